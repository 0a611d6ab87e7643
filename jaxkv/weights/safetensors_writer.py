"""Writes a safetensors file tensor by tensor, in the order of its header, so that no more than one piece is in memory.

The format: the header's length in 8 bytes (little-endian), the header (JSON: dtype, shape and place of every tensor), the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxkv.weights.canonical import CheckpointTensor

_ALIGNMENT = 8
_BFLOAT16, _FLOAT32 = ("BF16", np.dtype(ml_dtypes.bfloat16)), ("F32", np.dtype(np.float32))


def write_safetensors(path: Path, tensors: Sequence[CheckpointTensor]) -> None:
    """Matrices become bfloat16; norms stay in float32, as `build_params` keeps them. Raises OSError, and what reading raises."""
    with path.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors:
            _, dtype = _stored(tensor.shape)
            for values in tensor.chunks:
                file.write(np.ascontiguousarray(values, dtype).tobytes())


def _stored(shape: tuple[int, ...]) -> tuple[str, np.dtype[Any]]:
    return _FLOAT32 if len(shape) == 1 else _BFLOAT16


def _header(tensors: Sequence[CheckpointTensor]) -> bytes:
    # transformers refuses a file that does not say which framework's conventions it follows.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        name, dtype = _stored(tensor.shape)
        end = at + math.prod(tensor.shape) * dtype.itemsize
        entries[tensor.name] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
