"""GGUF metadata -> ModelConfig. Every `llama.*` key is read, known to be harmless, or refused by name."""

from __future__ import annotations

import math
from typing import Any

from jaxkv.core.errors import ModelLoadError
from jaxkv.models.config import ModelConfig, RopeConfig
from jaxkv.weights.gguf_header import GGUFHeader
from jaxkv.weights.gguf_rope_factors import llama3_from_factors
from jaxkv.weights.gguf_tensors import ROPE_FACTORS, read_rows
from jaxkv.weights.keys import Keys

_ARCHITECTURE = "llama"

# Keys with one supported value; any other would change the numbers.
_ONLY: dict[str, object] = {
    "attention.causal": True,
    "use_parallel_residual": False,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "tensor_data_layout": "Meta AI original pth",
}
_HARMLESS = ("rope.scaling.finetuned",)
_YARN_ONLY = ("attn_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")


def gguf_model_config(header: GGUFHeader) -> ModelConfig:
    """The ModelConfig of a GGUF file of architecture `llama` (Llama, SmolLM2, Mistral). Raises ModelLoadError."""
    keys = _architecture_keys(header)
    for key, supported in _ONLY.items():
        keys.require(key, supported)
    num_layers, hidden_size = keys.whole("block_count"), keys.whole("embedding_length")
    if num_layers > len(header.tensors):
        raise keys.refuse("block_count", f"the file has only {len(header.tensors)} tensors")
    num_heads = _per_layer(keys, "attention.head_count", num_layers)
    num_kv_heads = (
        _per_layer(keys, "attention.head_count_kv", num_layers) if "attention.head_count_kv" in keys else num_heads
    )
    if num_heads % num_kv_heads:
        raise keys.refuse("attention.head_count_kv", f"it must divide attention.head_count ({num_heads})")
    config = ModelConfig(
        vocab_size=_vocab_size(header, keys),
        hidden_size=hidden_size,
        intermediate_size=_per_layer(keys, "feed_forward_length", num_layers),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(keys, hidden_size, num_heads),
        max_position=keys.whole("context_length"),
        rms_norm_eps=keys.real_or("attention.layer_norm_rms_epsilon", 1e-5),
        rope=_rope(header, keys),
        sliding_window=keys.whole_or("attention.sliding_window", None),
        tie_embeddings="output.weight" not in header.tensors,
    )
    keys.finish(_HARMLESS)
    return config


def _architecture_keys(header: GGUFHeader) -> Keys:
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture != _ARCHITECTURE:
        raise ModelLoadError(
            f"{header.path}: general.architecture is {architecture!r}: only {_ARCHITECTURE!r} is supported"
        )
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ModelLoadError(f"{header.path}: general.type is {kind!r}: only a model can be served")
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelLoadError(
            f"{header.path}: split.count is {metadata['split.count']}: join the parts into one file first"
        )
    prefix = _ARCHITECTURE + "."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return Keys(own, f"{header.path} ({prefix}*)")


def _per_layer(keys: Keys, key: str, num_layers: int) -> int:
    """A whole number, or a list of the same number for every layer."""
    value = keys.peek(key)
    if not isinstance(value, list):
        return keys.whole(key)
    if len(value) != num_layers or len(set(value)) != 1:
        raise keys.refuse(key, "layers that differ are not supported")
    return Keys({key: value[0]}, keys.where).whole(key)


def _head_dim(keys: Keys, hidden_size: int, num_heads: int) -> int:
    head_dim = keys.whole_or("attention.key_length", None)
    if head_dim is None:
        if hidden_size % num_heads:
            raise keys.refuse(
                "embedding_length", f"without attention.key_length, it must be a multiple of {num_heads} heads"
            )
        head_dim = hidden_size // num_heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.whole_or(key, head_dim) != head_dim:
            raise keys.refuse(key, f"only the head dimension, {head_dim}, is supported")
    if head_dim % 2:
        raise keys.refuse(
            "attention.key_length", f"a head dimension of {head_dim} is odd, and rotary embedding needs pairs"
        )
    return head_dim


def _vocab_size(header: GGUFHeader, keys: Keys) -> int:
    """Rows of the embedding table; the metadata and the tokenizer must not say more."""
    table = header.tensors.get("token_embd.weight")
    if table is None:
        raise ModelLoadError(f"{header.path} lacks tensor token_embd.weight")
    rows = table.shape[0]
    if keys.whole_or("vocab_size", rows) != rows:
        raise keys.refuse("vocab_size", f"token_embd.weight has {rows} rows")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise ModelLoadError(
            f"{header.path}: tokenizer.ggml.tokens has {len(tokens)} entries, token_embd.weight {rows} rows"
        )
    return rows


def _rope(header: GGUFHeader, keys: Keys) -> RopeConfig:
    theta = keys.real_or("rope.freq_base", 10_000.0)
    factor = keys.real_or("rope.scaling.factor", keys.real_or("rope.scale_linear", None))
    kind = keys.text_or("rope.scaling.type", "none" if factor is None or factor == 1.0 else "linear")
    original = keys.whole_or("rope.scaling.original_context_length", None)
    yarn: dict[str, Any] = {name: keys.real_or(f"rope.scaling.{name}", None) for name in _YARN_ONLY}
    if kind != "yarn" and any(value not in (None, 1.0) for value in yarn.values()):
        raise keys.refuse(
            "rope.scaling.type", f"keys of yarn are set: {sorted(k for k, v in yarn.items() if v is not None)}"
        )
    factors = _rope_factors(header)
    if factors is not None:
        if kind != "none":
            raise keys.refuse("rope.scaling.type", f"together with tensor {ROPE_FACTORS} only 'none' is supported")
        return llama3_from_factors(factors, theta, original, str(header.path))
    if kind == "none":
        return RopeConfig(theta=theta)
    if factor is None:
        raise keys.refuse("rope.scaling.factor", f"rope.scaling.type {kind!r} needs it")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn":
        return _yarn(keys, theta, factor, original, yarn)
    raise keys.refuse("rope.scaling.type", "supported are none, linear, yarn")


def _yarn(keys: Keys, theta: float, factor: float, original: int | None, yarn: dict[str, Any]) -> RopeConfig:
    """GGUF's attention factor multiplies yarn's own one; RopeConfig's replaces it."""
    if original is None:
        raise keys.refuse("rope.scaling.original_context_length", "rope.scaling.type 'yarn' needs it")
    extra = yarn["yarn_attn_factor"] or yarn["attn_factor"]
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=yarn["yarn_beta_fast"] or 32.0,
        beta_slow=yarn["yarn_beta_slow"] or 1.0,
        attention_factor=None if extra is None else extra * (1.0 + 0.1 * math.log(max(factor, 1.0))),
    )


def _rope_factors(header: GGUFHeader) -> Any:
    tensor = header.tensors.get(ROPE_FACTORS)
    return None if tensor is None else read_rows(header, tensor, 0, tensor.shape[0])
