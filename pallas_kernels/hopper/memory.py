"""Shared memory in the forms that TMA, `wgmma` and a warpgroup's registers agree on."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

Ref = Any
"""A Pallas reference: its type has no public name."""

ROW_BLOCKS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
"""Blocks of 8 x 64 elements spread over a warpgroup, 4 consecutive ones for each thread."""


def tiled(shape: tuple[int, ...], dtype: Any, columns: int = 64) -> Any:
    """Shared memory for rows in the swizzled form that `wgmma` and TMA agree on, in blocks of so many columns: at most 128 bytes."""
    swizzle = columns * jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
