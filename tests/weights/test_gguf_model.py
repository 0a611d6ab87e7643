"""A GGUF file gives the tree of the checkpoint it was converted from; what it cannot mean is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from oracle.goldens import load_tiny_golden
from safetensors.numpy import load_file
from weights.gguf_writer import llama3_factors, metadata_of, to_gguf_tensors, write_gguf
from weights.numpy_decoder import log_probabilities

from jaxkv.core.errors import ModelLoadError
from jaxkv.models.config import RopeConfig
from jaxkv.weights.gguf_header import read_gguf_header
from jaxkv.weights.gguf_tensors import read_rows
from jaxkv.weights.load import LoadedModel, load_model, read_config
from jaxkv.weights.source import ModelSource


def parts_of(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors of a tiny checkpoint, converted."""
    directory = load_tiny_golden(name).path
    config = json.loads((directory / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(path))
    return metadata_of(config), to_gguf_tensors(tensors, config["head_dim"])


def load(path: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelSource("gguf", path, "tiny"), dtype)


def write(
    path: Path, name: str = "default", *, kind: Kind = Kind.F32, drop: str = "", add: Any = None, **changes: Any
) -> Path:
    """`changes`: metadata keys with "__" for "."; None leaves a key out. `add`: further tensors."""
    metadata, tensors = parts_of(name)
    metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    tensors.pop(drop, None)
    write_gguf(path / "tiny.gguf", metadata, {**tensors, **(add or {})}, kind)
    return path / "tiny.gguf"


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_same_tree(found: dict, expected: dict, rtol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_tree(found[key], value, rtol)
        else:
            scale = np.abs(value).max()
            np.testing.assert_allclose(found[key] / scale, value / scale, atol=rtol, err_msg=key)


@pytest.mark.parametrize("name", ["default", "untied_mha", "wide_heads"])
def test_equals_the_checkpoint_it_came_from(tmp_path: Path, name: str) -> None:
    golden = load_tiny_golden(name)
    expected = load_model(ModelSource("hf_dir", golden.path, name), "float32")
    found = load(write(tmp_path, name))
    assert_same_tree(found.params, expected.params)
    np.testing.assert_allclose(log_probabilities(found.config, found.params, golden.ids), golden.logprobs, atol=2e-4)


def test_equals_it_in_bfloat16(tmp_path: Path) -> None:
    golden = load_tiny_golden("default")
    expected = load_model(ModelSource("hf_dir", golden.path, "default"), "bfloat16").params
    found = load(write(tmp_path, kind=Kind.BF16), "bfloat16").params
    assert found["embed"].dtype == expected["embed"].dtype
    np.testing.assert_array_equal(found["layers"]["qkv"], expected["layers"]["qkv"])
    np.testing.assert_array_equal(found["layers"]["down"], expected["layers"]["down"])


# Relative to a tensor's largest weight, half a step of the format.
@pytest.mark.parametrize(
    ("kind", "error"),
    [(Kind.F16, 1e-3), (Kind.Q8_0, 0.01), (Kind.Q5_0, 0.07), (Kind.Q5_1, 0.07), (Kind.Q4_0, 0.13), (Kind.Q4_1, 0.13)],
)
def test_quantized_tensors_are_near(tmp_path: Path, kind: Kind, error: float) -> None:
    golden = load_tiny_golden("default")
    expected = load_model(ModelSource("hf_dir", golden.path, "default"), "float32").params
    assert_same_tree(load(write(tmp_path, kind=kind)).params, expected, rtol=error)


BLOCK_TYPES = sorted(gguf.quants._type_traits, key=lambda kind: kind.value)


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=[kind.name for kind in BLOCK_TYPES])
def test_every_type_of_the_package_is_read(tmp_path: Path, kind: Kind) -> None:
    """Random bytes: what counts is that rows and offsets are right for every block size."""
    rows, columns = 6, 512
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 60, (rows, columns // block * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("first", np.zeros(3, np.float32))
    writer.add_tensor("w", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf_header(tmp_path / "x.gguf")
    assert header.tensors["w"].shape == (rows, columns)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(stored, kind)
    np.testing.assert_array_equal(read_rows(header, header.tensors["w"], 0, rows), expected)
    np.testing.assert_array_equal(read_rows(header, header.tensors["w"], 2, 5), expected[2:5])


def test_tokenizer_and_ends_of_turn(tmp_path: Path) -> None:
    model = load(write(tmp_path, general__sampling__temp=0.5))
    data = model.tokenizer_data
    assert data is not None
    assert (data.model, data.pre, len(data.tokens), data.merges) == ("gpt2", "smollm", 160, ["t 1", "t 2"])
    assert (data.bos_id, data.eos_id, data.eot_id, data.add_bos) == (None, 2, 5, False)
    assert data.chat_template == "{{ messages }}"
    assert model.eos_ids == (2, 5)
    assert model.generation_config == {"temperature": 0.5}


def test_begin_of_sequence_where_the_file_is_silent(tmp_path: Path) -> None:
    """Then the tokenizer goes by the custom of the model, which only it knows."""
    path = write(tmp_path, tokenizer__ggml__add_bos_token=None)
    data = load(path).tokenizer_data
    assert data is not None
    assert data.add_bos is None


def test_rope_scalings(tmp_path: Path) -> None:
    def rope(**changes: Any) -> RopeConfig:
        keys = {f"llama__rope__{key}": value for key, value in changes.items()}
        return read_config(ModelSource("gguf", write(tmp_path, **keys), "tiny")).rope

    assert rope() == RopeConfig(theta=10000.0)
    assert rope(freq_base=5e5) == RopeConfig(theta=5e5)
    assert rope(scaling__type="none", scaling__factor=1.0) == RopeConfig()
    assert rope(scaling__type="linear", scaling__factor=4.0) == RopeConfig(kind="linear", factor=4.0)
    assert rope(scale_linear=2.0) == RopeConfig(kind="linear", factor=2.0)
    yarn = {"scaling__type": "yarn", "scaling__factor": 4.0, "scaling__original_context_length": 32}
    assert rope(**yarn, scaling__finetuned=True) == RopeConfig(kind="yarn", factor=4.0, original_max_position=32)
    assert rope(**yarn, scaling__attn_factor=0.5).attention_factor == pytest.approx(0.5 * (1 + 0.1 * np.log(4.0)))


@pytest.mark.parametrize("original", [None, 64])
def test_llama3_scaling_is_read_from_its_tensor(tmp_path: Path, original: int | None) -> None:
    factors = llama3_factors(16, 10000.0, 8.0, original or 8192)
    path = write(
        tmp_path,
        "llama3",
        add={"rope_freqs.weight": factors},
        llama__rope__scaling__original_context_length=original,
    )
    model = load(path)
    assert model.config.rope == RopeConfig(kind="llama3", factor=8.0, original_max_position=original or 8192)
    if original == 64:
        golden = load_tiny_golden("llama3")
        found = log_probabilities(model.config, model.params, golden.ids)
        np.testing.assert_allclose(found, golden.logprobs, atol=2e-4)


def test_rope_tensor_of_ones_is_no_scaling(tmp_path: Path) -> None:
    assert load(write(tmp_path, add={"rope_freqs.weight": np.ones(8, np.float32)})).config.rope == RopeConfig()


@pytest.mark.parametrize("factors", [np.arange(1, 9), np.zeros(8), np.full(8, np.nan), np.full(8, 8.0)])
def test_rope_tensor_that_is_not_llama3(tmp_path: Path, factors: np.ndarray) -> None:
    assert "rope_freqs.weight" in refusal(write(tmp_path, add={"rope_freqs.weight": factors.astype(np.float32)}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama__attention__head_count_kv": [2, 4]}, "attention.head_count_kv is [2, 4]"),
        ({"llama__attention__head_count_kv": 3}, "attention.head_count_kv is 3"),
        ({"llama__expert_count": 8}, "expert_count is 8"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count is 8"),
        ({"llama__attention__value_length": 8}, "attention.value_length is 8"),
        ({"llama__block_count": None}, "block_count"),
        ({"llama__block_count": 2**31 - 1}, "block_count is 2147483647"),
        ({"llama__block_count": 3}, "lacks tensors blk.2.attn_norm.weight"),
        ({"tokenizer__ggml__tokens": "t0"}, "tokens is 't0'"),
        ({"llama__rope__scaling__type": "longrope", "llama__rope__scaling__factor": 2.0}, "'longrope'"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 2.0}, "original_context_length"),
        ({"llama__rope__freq_base": float("nan")}, "rope.freq_base is nan"),
        ({"llama__attention__layer_norm_rms_epsilon": float("inf")}, "layer_norm_rms_epsilon is inf"),
        ({"llama__final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"llama__vocab_size": 161}, "vocab_size is 161"),
        ({"tokenizer__ggml__tokens": [f"t{i}" for i in range(161)]}, "161"),
        ({"tokenizer__ggml__tokens": None}, "tokens"),
        ({"tokenizer__ggml__token_type": [1, 2]}, "token_type has 2"),
        ({"tokenizer__ggml__model": "rwkv"}, "'rwkv'"),
        ({"tokenizer__ggml__eos_token_id": 160}, "eos_token_id is 160"),
        ({"split__count": 3}, "split.count is 3"),
        ({"general__type": "adapter"}, "'adapter'"),
    ],
)
def test_metadata_that_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    assert named in refusal(write(tmp_path, **changes))


def test_other_architectures(tmp_path: Path) -> None:
    metadata, tensors = parts_of("default")
    write_gguf(tmp_path / "tiny.gguf", metadata, tensors, architecture="qwen2")
    assert "general.architecture is 'qwen2'" in refusal(tmp_path / "tiny.gguf")


def test_tensors_are_accounted_for(tmp_path: Path) -> None:
    assert "lacks tensor blk.1.attn_q.weight" in refusal(write(tmp_path, drop="blk.1.attn_q.weight"))
    assert "lacks tensor token_embd.weight" in refusal(write(tmp_path, drop="token_embd.weight"))
    extra = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    assert "has tensor blk.0.attn_q.bias" in refusal(write(tmp_path, add=extra))
    wrong = {"blk.1.ffn_down.weight": np.zeros((64, 32), np.float32)}
    assert "tensor blk.1.ffn_down.weight has shape [64, 32]" in refusal(write(tmp_path, add=wrong))
    broken = {"blk.1.ffn_down.weight": np.full((64, 64), np.nan, np.float32)}
    assert "blk.1.ffn_down.weight holds NaN" in refusal(write(tmp_path, add=broken))
