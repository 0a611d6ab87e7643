"""ModelConfig -> Hugging Face's config.json, such that `hf_config` reads the same ModelConfig back."""

from __future__ import annotations

from typing import Any

from jaxkv.models.config import ModelConfig, RopeConfig


def hf_config_values(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that describe the decoder. Rope is spelled as transformers 4 does, which 5 reads as well."""
    kind = "llama" if config.sliding_window is None else "mistral"
    values: dict[str, Any] = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.sliding_window is None:
        return values | {"attention_bias": False, "mlp_bias": False}
    return values | {"sliding_window": config.sliding_window}


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    table: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "linear":
        return table
    table["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        return table | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    optional = {name: getattr(rope, name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
    return table | {name: value for name, value in optional.items() if value is not None}
