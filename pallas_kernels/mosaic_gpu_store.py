"""The store that the Mosaic GPU kernels share, on every version of JAX that they run on."""

from __future__ import annotations

from typing import Any

from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu


def store(ref: Any, value: Array) -> None:
    """Stores an array to a reference in global or shared memory, in whatever order its layout gives.

    JAX 0.11 does so for `ref[...] = value`; from 0.12 on that asks for an order that is fast in shared memory, and global memory
    knows none.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
