"""What the builder of the parameter tree needs from a checkpoint, whatever its file format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
"""float32, float16 or (from ml_dtypes) bfloat16."""


class TensorReader(Protocol):
    """Tensors under Hugging Face's names, [out, in], with heads in Hugging Face's order (rotate-half)."""

    @property
    def where(self) -> str:
        """The file or directory, for errors."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of the checkpoint and its shape, without reading any. A name that has no counterpart at Hugging
        Face stands as the file spells it, so that it is reported as unread."""

    def spelled(self, name: str) -> str:
        """The tensor's name as the file spells it, for errors."""

    def read(self, name: str, start: int, stop: int) -> FloatArray:
        """Rows [start, stop) of a tensor. For query and key projections, both are multiples of a KV group's rows."""
