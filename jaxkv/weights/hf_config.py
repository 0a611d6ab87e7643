"""Hugging Face's config.json -> ModelConfig. Every key is read, known to be harmless, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxkv.core.errors import ModelLoadError
from jaxkv.models.config import ModelConfig
from jaxkv.weights.hf_rope import read_rope
from jaxkv.weights.json_file import read_json
from jaxkv.weights.keys import Keys

_LLAMA = "LlamaForCausalLM"
_MISTRAL = "MistralForCausalLM"

# What transformers takes for a key that is absent, where the architectures differ.
_DEFAULT_KV_HEADS: dict[str, int | None] = {_LLAMA: None, _MISTRAL: 8}
_DEFAULT_MAX_POSITION = {_LLAMA: 2048, _MISTRAL: 131072}
_DEFAULT_SLIDING_WINDOW = {_LLAMA: None, _MISTRAL: 4096}

# Keys with one supported value; any other would change the numbers.
_ONLY: dict[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "use_bfloat16": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
}

# Bookkeeping, training, token ids, and defaults of generation (which are read from generation_config.json).
_HARMLESS = """
_name_or_path architectures model_type transformers_version torch_dtype dtype is_llama_config is_decoder use_cache
initializer_range attention_dropout hidden_dropout resid_pdrop pretraining_tp attn_implementation
_attn_implementation _attn_implementation_autoset transformers.js_config unsloth_version unsloth_fixed
bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id unk_token_id tokenizer_class prefix
return_dict output_hidden_states output_attentions torchscript finetuning_task id2label label2id problem_type
task_specific_params cross_attention_hidden_size tf_legacy_loss max_window_layers
max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""


def read_hf_config(directory: Path) -> ModelConfig:
    """Reads `directory/config.json`. Raises ModelLoadError that names the key and its value."""
    path = directory / "config.json"
    return hf_model_config(read_json(path), str(path))


def hf_model_config(values: Mapping[str, object], where: str) -> ModelConfig:
    """The ModelConfig of a parsed config.json; `where` names it in errors."""
    keys = Keys(values, where)
    architecture = _architecture(keys)
    for key, supported in _ONLY.items():
        keys.require(key, supported)
    if "quantization_config" in keys:
        raise keys.refuse("quantization_config", "quantized checkpoints are not supported: take the unquantized one")

    hidden_size = keys.whole("hidden_size")
    num_heads = keys.whole("num_attention_heads")
    num_kv_heads = keys.whole_or("num_key_value_heads", _DEFAULT_KV_HEADS[architecture]) or num_heads
    if num_heads % num_kv_heads:
        raise keys.refuse("num_key_value_heads", f"it must divide num_attention_heads ({num_heads})")
    head_dim = keys.whole_or("head_dim", None)
    if head_dim is None:
        if hidden_size % num_heads:
            raise keys.refuse("hidden_size", f"without head_dim, it must be a multiple of {num_heads} heads")
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise keys.refuse("head_dim", f"a head dimension of {head_dim} is odd, and rotary embedding needs pairs")
    max_position = keys.whole_or("max_position_embeddings", _DEFAULT_MAX_POSITION[architecture])

    config = ModelConfig(
        vocab_size=keys.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.whole("intermediate_size"),
        num_layers=keys.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=keys.real_or("rms_norm_eps", 1e-6),
        rope=read_rope(keys, max_position),
        sliding_window=_sliding_window(keys, architecture, max_position),
        tie_embeddings=keys.flag_or("tie_word_embeddings", False),
    )
    keys.finish(_HARMLESS.split())
    return config


def _architecture(keys: Keys) -> str:
    names = keys.peek("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name not in (_LLAMA, _MISTRAL):
        raise keys.refuse("architectures", f"supported are {_LLAMA} and {_MISTRAL}")
    return str(name)


def _sliding_window(keys: Keys, architecture: str, max_position: int) -> int | None:
    """The window, or None. An explicit null is "no window"; an absent key is the architecture's own default."""
    default = None if keys.is_null("sliding_window") else _DEFAULT_SLIDING_WINDOW[architecture]
    window = keys.whole_or("sliding_window", default)
    if not keys.flag_or("use_sliding_window", True):
        window = None
    if architecture == _LLAMA and window is not None:
        if window < max_position:
            raise keys.refuse("sliding_window", f"{_LLAMA} attends to all positions: set it to null")
        window = None
    _check_layer_types(keys, window)
    return window


def _check_layer_types(keys: Keys, window: int | None) -> None:
    kind = "full_attention" if window is None else "sliding_attention"
    types = keys.peek("layer_types")
    if types is not None and (not isinstance(types, list) or any(entry != kind for entry in types)):
        raise keys.refuse("layer_types", f"with sliding_window {window}, only {kind} in every layer is supported")


def hf_eos_ids(*configs: Mapping[str, object]) -> tuple[int, ...]:
    """All `eos_token_id` of the given JSON objects (a number or a list of them), in order, each once."""
    ids: dict[int, None] = {}
    for config in configs:
        value = config.get("eos_token_id")
        for entry in value if isinstance(value, list) else [value]:
            if entry is None:
                continue
            if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
                raise ModelLoadError(f"eos_token_id is {value!r}: it must be a token id or a list of them")
            ids[entry] = None
    return tuple(ids)
