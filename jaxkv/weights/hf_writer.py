"""Writes a checkpoint's configuration and weights as a Hugging Face directory. Its tokenizer is `jaxkv.text`'s to write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxkv.weights.canonical import checkpoint_tensors
from jaxkv.weights.hf_config_writer import hf_config_values
from jaxkv.weights.json_file import read_json
from jaxkv.weights.load import Checkpoint
from jaxkv.weights.safetensors_writer import write_safetensors


def write_hf_model(checkpoint: Checkpoint, directory: Path, *, bos_id: int | None, eos_ids: Sequence[int]) -> None:
    """Writes model.safetensors (bfloat16, norms float32), config.json and generation_config.json into an existing directory.

    eos_ids: every end of a turn, the main one first. Files that came from a Hugging Face directory keep what they say beside the
    dtype. Raises ModelLoadError for what cannot be read, OSError for what cannot be written.
    """
    write_safetensors(directory / "model.safetensors", checkpoint_tensors(checkpoint.config, checkpoint.reader))
    source = checkpoint.source
    if source.kind == "hf_dir":
        config: Mapping[str, Any] = read_json(source.path / "config.json")
        own = source.path / "generation_config.json"
        generation = read_json(own) if own.exists() else None
    else:
        ids = _token_ids(bos_id, eos_ids)
        # config.json names one end only: older readers take no list there.
        config = hf_config_values(checkpoint.config) | ids | ({"eos_token_id": eos_ids[0]} if eos_ids else {})
        generation = ids | _sampling(checkpoint.generation_config)
    _write_json(directory / "config.json", {**_without_dtype(config), "torch_dtype": "bfloat16"})
    if generation is not None:
        _write_json(directory / "generation_config.json", generation)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_dtype(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}


def _token_ids(bos_id: int | None, eos_ids: Sequence[int]) -> dict[str, Any]:
    ids: dict[str, Any] = {"bos_token_id": bos_id, "eos_token_id": list(eos_ids)}
    return {key: value for key, value in ids.items() if value not in (None, [])}


def _sampling(defaults: Mapping[str, int | float]) -> dict[str, Any]:
    """transformers goes by the other keys only where do_sample is set; its temperature must be above 0."""
    if not defaults or defaults.get("temperature") == 0:
        return {"do_sample": False}
    return {"do_sample": True, **defaults}
