"""Safetensors directories that are incomplete, damaged or contradictory are refused, naming file and tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle.goldens import load_tiny_golden
from safetensors.numpy import load_file, save_file

from jaxkv.core.errors import ModelLoadError
from jaxkv.weights.load import LoadedModel, load_model
from jaxkv.weights.source import ModelSource


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(load_tiny_golden(name).path, tmp_path / name))

    return copy


def load(directory: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelSource("hf_dir", directory, directory.name), dtype)


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_missing_tensor(copy_of) -> None:
    directory = copy_of("default")
    rewrite(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "lacks tensor model.layers.1.mlp.up_proj.weight" in refusal(directory)


def test_unread_tensor(copy_of) -> None:
    directory = copy_of("default")
    rewrite(
        directory, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)})
    )
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(directory)


def test_tensors_of_a_layer_too_many(copy_of) -> None:
    directory = copy_of("default")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    assert "model.layers.1." in refusal(directory)


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("num_hidden_layers", "model.layers.2.input_layernorm.weight"),
        (
            "vocab_size",
            "tensor model.embed_tokens.weight has shape [160, 64], the configuration asks for [2147483647, 64]",
        ),
        ("intermediate_size", "tensor model.layers.0.mlp.gate_proj.weight has shape"),
    ],
)
def test_absurd_sizes_are_noticed_before_memory_is_taken(copy_of, key: str, named: str) -> None:
    directory = copy_of("default")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, key: 2**31 - 1}))
    assert named in refusal(directory)


def test_wrong_shape(copy_of) -> None:
    directory = copy_of("default")
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": np.ones(63, np.float32)}))
    message = refusal(directory)
    assert "model.norm.weight" in message
    assert "[63]" in message
    assert "[64]" in message


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers(copy_of, dtype, value: float) -> None:
    directory = copy_of("default")
    name = "model.layers.1.self_attn.k_proj.weight"

    def damage(tensors: dict[str, Any]) -> None:
        tensors[name] = tensors[name].astype(dtype)
        tensors[name][5, 7] = value

    rewrite(directory, damage)
    assert name in refusal(directory)


def test_unsupported_dtype(copy_of) -> None:
    directory = copy_of("default")
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": np.ones(64, np.int8)}))
    assert "model.norm.weight is I8" in refusal(directory)


@pytest.mark.parametrize("keep", [0, 4, 100, 3000, -1])
def test_truncated_file(copy_of, keep: int) -> None:
    path = copy_of("default") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refusal(path.parent)


def test_missing_shard(copy_of) -> None:
    directory = copy_of("llama3")
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refusal(directory)


def test_shard_without_what_the_index_says(copy_of) -> None:
    directory = copy_of("llama3")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    assert "lacks tensor model.extra.weight" in refusal(directory)


def test_index_that_points_out_of_the_directory(copy_of) -> None:
    directory = copy_of("llama3")
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../default/model.safetensors"
    index.write_text(json.dumps(content))
    assert "'../default/model.safetensors'" in refusal(directory)


def test_no_weights_at_all(copy_of) -> None:
    directory = copy_of("default")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    message = refusal(directory)
    assert "neither model.safetensors nor" in message
    assert "pytorch_model.bin" in message


def test_tied_checkpoint_that_carries_the_table_twice(copy_of) -> None:
    directory = copy_of("default")
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    assert "lm_head" not in load(directory).params

    def differ(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"][159, 63] = 0

    rewrite(directory, differ)
    assert "tie_word_embeddings" in refusal(directory)


def test_untied_configuration_without_a_head(copy_of) -> None:
    directory = copy_of("default")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert "lacks tensor lm_head.weight" in refusal(directory)


def test_rotary_tables_of_old_checkpoints_are_passed_over(copy_of) -> None:
    directory = copy_of("default")
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    rewrite(directory, lambda tensors: tensors.update(table))
    load(directory)


def test_pieces_give_the_same_tree(copy_of, monkeypatch) -> None:
    directory = copy_of("wide_heads")
    whole = load(directory).params
    monkeypatch.setattr("jaxkv.weights.canonical._CHUNK_ELEMENTS", 500)
    pieces = load(directory).params
    for name in ("embed", "final_norm"):
        np.testing.assert_array_equal(whole[name], pieces[name])
    for name, array in whole["layers"].items():
        np.testing.assert_array_equal(array, pieces["layers"][name])


def test_sampling_defaults_and_ends_of_turn(copy_of) -> None:
    directory = copy_of("default")
    generation = {"temperature": 0.6, "top_k": 40, "do_sample": True, "eos_token_id": [9, 2], "max_length": 10}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    model = load(directory)
    assert model.generation_config == {"temperature": 0.6, "top_k": 40}
    assert model.eos_ids == (9, 2)
    (directory / "generation_config.json").write_text('{"temperature": "hot"}')
    assert "temperature is 'hot'" in refusal(directory)
