"""A checkpoint, written as a Hugging Face directory, is read back as the same model."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from oracle.goldens import TINY_NAMES, load_tiny_golden
from safetensors import safe_open
from weights.gguf_writer import tiny_gguf

from jaxkv.models.config import ModelConfig, RopeConfig
from jaxkv.weights import canonical
from jaxkv.weights.canonical import CheckpointTensor
from jaxkv.weights.hf_config import hf_model_config
from jaxkv.weights.hf_config_writer import hf_config_values
from jaxkv.weights.hf_writer import write_hf_model
from jaxkv.weights.load import load_model, open_checkpoint, read_config
from jaxkv.weights.safetensors_writer import write_safetensors
from jaxkv.weights.source import ModelSource

PLAIN = ModelConfig(160, 64, 96, 2, 4, 2, 16, 128, rms_norm_eps=1e-6)
ROPES = (
    RopeConfig(theta=5e5),
    RopeConfig(kind="linear", factor=4.0),
    RopeConfig(kind="llama3", factor=8.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_position=64),
    RopeConfig(kind="yarn", factor=4.0, original_max_position=32, beta_fast=30.0, beta_slow=2.0, truncate=False),
    RopeConfig(kind="yarn", factor=4.0, original_max_position=32, attention_factor=0.7),
    RopeConfig(kind="yarn", factor=4.0, original_max_position=32, mscale=0.5, mscale_all_dim=0.25),
)


def gguf(path: Path, name: str, kind: Kind = Kind.F32, **changes: Any) -> ModelSource:
    tiny_gguf(path, load_tiny_golden(name).path, kind, **changes)
    return ModelSource("gguf", path, name)


def convert(source: ModelSource, target: Path) -> ModelSource:
    checkpoint = open_checkpoint(source)
    target.mkdir()
    write_hf_model(checkpoint, target, bos_id=1, eos_ids=checkpoint.eos_ids)
    return ModelSource("hf_dir", target, target.name)


def assert_same_tree(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_tree(found[key], value)
        else:
            assert found[key].dtype == value.dtype
            np.testing.assert_array_equal(found[key], value, err_msg=key)


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 9, "tie_embeddings": True, "head_dim": 32}])
def test_config_json_is_read_as_the_same_configuration(rope: RopeConfig, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(PLAIN, rope=rope, **changes)
    assert hf_model_config(json.loads(json.dumps(hf_config_values(config))), "here") == config


@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_hugging_face_directory_becomes_the_same_in_bfloat16(tmp_path: Path, name: str) -> None:
    source = ModelSource("hf_dir", load_tiny_golden(name).path, name)
    before, after = load_model(source, "bfloat16"), load_model(convert(source, tmp_path / "out"), "bfloat16")
    assert (after.config, after.eos_ids, after.generation_config) == (before.config, (2,), {})
    assert_same_tree(after.params, before.params)


@pytest.mark.parametrize(("name", "kind"), [("default", Kind.Q4_1), ("untied_mha", Kind.F16), ("wide_heads", Kind.F32)])
def test_a_gguf_file_becomes_the_same_in_bfloat16(tmp_path: Path, name: str, kind: Kind) -> None:
    source = gguf(tmp_path / "tiny.gguf", name, kind, **{"general.sampling.temp": 0.5})
    before, after = load_model(source, "bfloat16"), load_model(convert(source, tmp_path / "out"), "bfloat16")
    assert (after.config, after.eos_ids) == (before.config, before.eos_ids) == (read_config(source), (2, 5))
    assert after.generation_config == before.generation_config == {"temperature": 0.5}
    assert_same_tree(after.params, before.params)


def test_what_other_readers_find(tmp_path: Path) -> None:
    convert(gguf(tmp_path / "tiny.gguf", "default"), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    assert {name for name, kind in kinds.items() if kind != "BF16"} == {name for name in kinds if "norm" in name}
    assert "lm_head.weight" not in kinds
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["torch_dtype"], config["bos_token_id"], config["eos_token_id"]) == ("bfloat16", 1, 2)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 5], "do_sample": False}


def test_pieces_of_tensors_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = gguf(tmp_path / "tiny.gguf", "default")
    whole = convert(source, tmp_path / "whole")
    monkeypatch.setattr(canonical, "_CHUNK_ELEMENTS", 1500)
    pieces = convert(source, tmp_path / "pieces")
    assert (pieces.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()


def test_one_piece_is_in_memory_at_a_time(tmp_path: Path) -> None:
    pieces, rows, columns = 24, 1024, 256
    chunks = (np.full((rows, columns), i, np.float32) for i in range(pieces))
    tracemalloc.start()
    try:
        write_safetensors(tmp_path / "x", [CheckpointTensor("x", (pieces * rows, columns), chunks)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    piece = rows * columns * 4
    assert peak < 4 * piece < (tmp_path / "x").stat().st_size
    with safe_open(tmp_path / "x", framework="numpy") as file:
        stored = file.get_tensor("x")
    assert stored.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(stored[::rows, 0].astype(int), range(pieces))
