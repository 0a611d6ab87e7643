"""config.json: every key that matters is read, and what is not supported is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxkv.core.errors import ModelLoadError
from jaxkv.models.config import RopeConfig
from jaxkv.weights.hf_config import hf_eos_ids, hf_model_config, read_hf_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}


def read(values: dict[str, Any], **changes: Any) -> Any:
    return hf_model_config({**values, **changes}, "config.json")


def test_defaults_are_those_of_the_architecture() -> None:
    llama = read(LLAMA)
    assert (llama.num_kv_heads, llama.head_dim, llama.rms_norm_eps) == (8, 8, 1e-6)
    assert llama.sliding_window is None
    assert not llama.tie_embeddings
    assert llama.rope == RopeConfig(theta=10000.0)
    mistral = read({key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"})
    assert (mistral.num_kv_heads, mistral.sliding_window) == (8, 4096)


def test_head_dim_wins_over_the_quotient() -> None:
    assert read(LLAMA, head_dim=32).head_dim == 32
    assert read(LLAMA, head_dim=None).head_dim == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"rope_theta": 5e5}},
    ],
)
def test_rope_theta_is_found_wherever_it_stands(changes: dict[str, Any]) -> None:
    assert read(LLAMA, **changes).rope == RopeConfig(theta=5e5)


def test_rope_scalings() -> None:
    linear = read(LLAMA, rope_scaling={"type": "linear", "factor": 4})
    assert linear.rope == RopeConfig(kind="linear", factor=4.0)
    table = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 = read(LLAMA, rope_scaling={**table, "original_max_position_embeddings": 512})
    assert llama3.rope == RopeConfig(kind="llama3", factor=8.0, original_max_position=512)
    assert read(LLAMA, rope_scaling=table).rope.original_max_position == 4096
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 1024, "beta_fast": 16, "attention_factor": 0.5}
    found = read(LLAMA, rope_parameters={**yarn, "truncate": False}).rope
    assert (found.factor, found.beta_fast, found.attention_factor, found.truncate) == (4.0, 16.0, 0.5, False)


def test_sliding_window() -> None:
    assert read(MISTRAL, sliding_window=128).sliding_window == 128
    assert read(MISTRAL, sliding_window=None).sliding_window is None
    assert read(MISTRAL, sliding_window=128, use_sliding_window=False).sliding_window is None
    assert read(MISTRAL, sliding_window=8, layer_types=["sliding_attention"] * 2).sliding_window == 8
    assert read(LLAMA, sliding_window=4096).sliding_window is None


def test_harmless_keys_pass() -> None:
    read(LLAMA, torch_dtype="bfloat16", use_cache=False, pretraining_tp=1, some_new_key=None, attention_bias=False)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"architectures": None}, "architectures"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"hidden_size": 65}, "hidden_size is 65"),
        ({"head_dim": 7}, "head_dim"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"vocab_size": "100"}, "vocab_size is '100'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": 2**40}, "intermediate_size"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 10000.0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn"}}, "type is 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mrope_section": [1]}}, "mrope_section"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}},
            "low_freq",
        ),
        ({"rope_scaling": {"factor": 2}, "rope_parameters": {"factor": 4}}, "rope_scaling"),
        ({"rope_scaling": 4}, "rope_scaling is 4"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(LLAMA, **changes)
    assert named in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"a": NaN}', "NaN"),
        (b"[1, 2]", "list"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_damaged_json(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=named):
        read_hf_config(tmp_path)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        read_hf_config(tmp_path)


def test_eos_ids_are_joined_in_order() -> None:
    assert hf_eos_ids({"eos_token_id": [5, 3]}, {"eos_token_id": 3}, {"eos_token_id": None}, {}) == (5, 3)
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        hf_eos_ids({"eos_token_id": "</s>"})
