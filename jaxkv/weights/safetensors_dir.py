"""Tensors of a Hugging Face model directory: model.safetensors, or the shards of its index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - safetensors needs numpy to know the name bfloat16
from safetensors import SafetensorError, safe_open

from jaxkv.core.errors import ModelLoadError
from jaxkv.weights.json_file import read_json
from jaxkv.weights.tensor_reader import FloatArray

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "BF16", "F16")


class SafetensorsDir:
    """A TensorReader over a directory. Opening maps the files and checks their headers; `read` copies."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.files = tuple(directory / name for name in _shards(directory))
        self._slices: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            for name, tensor in _open(path):
                if name in shapes:
                    raise ModelLoadError(f"{directory}: tensor {name} stands in more than one shard")
                if tensor.get_dtype() not in _FLOATS:
                    raise ModelLoadError(
                        f"{path}: tensor {name} is {tensor.get_dtype()}, only {', '.join(_FLOATS)} are supported"
                    )
                shapes[name] = tuple(tensor.get_shape())
                self._slices[name] = tensor
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    @property
    def where(self) -> str:
        return str(self._directory)

    def spelled(self, name: str) -> str:
        return name

    def read(self, name: str, start: int, stop: int) -> FloatArray:
        values: FloatArray = self._slices[name][start:stop]
        return values


def _shards(directory: Path) -> list[str]:
    """File names that hold the weights, each checked to be a plain name in this directory."""
    if not (directory / _INDEX).exists():
        if (directory / _SINGLE).exists():
            return [_SINGLE]
        other = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf") for path in directory.glob(pattern))
        found = f" (it has {', '.join(other[:3])}, which is not safetensors)" if other else ""
        raise ModelLoadError(f"{directory} has neither {_SINGLE} nor {_INDEX}{found}")
    weight_map = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{directory / _INDEX} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelLoadError(f"{directory / _INDEX}: tensor {tensor} points to {name!r}, which is not a file name")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        present = {name for name, _ in _open(directory / shard)}
        lacking = [tensor for tensor, name in weight_map.items() if name == shard and tensor not in present]
        if lacking:
            raise ModelLoadError(f"{directory / shard} lacks tensor {lacking[0]}, which the index says it holds")
    return shards


def _open(path: Path) -> list[tuple[str, Any]]:
    """Names and lazy slices of a file's tensors; each slice keeps the file mapped."""
    try:
        file: Any = safe_open(path, framework="numpy")
        return [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 - it is no mapping
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist: the model is incomplete, fetch it again") from None
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is truncated or corrupt ({error}): fetch it again") from error
