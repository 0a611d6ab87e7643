"""What a thread block of the Hopper kernel works on: its tile of rows, and the rings of tiles of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import Ref

_ROW_BLOCKS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
"""Blocks of 8 x 64 elements spread over a warpgroup, 4 consecutive ones for each thread."""


@dataclass(frozen=True)
class RowTile:
    """The rows of one thread block, all scalars of the running kernel: it owns rows [row, row + 128) of `head`.

    low, high: the key tiles [low, high) that its queries see between them.
    """

    batch: Array
    row: Array
    head: Array
    kv_head: Array
    q_len: Array
    kv_len: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Ring:
    """A ring of tiles in shared memory: tile number t lies in slot t % slots."""

    tiles: Ref
    full: Ref
    free: Ref
    slots: int

    def slot(self, t: Array) -> Array:
        return lax.rem(t, jnp.int32(self.slots))

    def wait(self, t: Array) -> Ref:
        """The tile, once it is full."""
        plgpu.barrier_wait(self.full.at[self.slot(t)])
        return self.tiles.at[self.slot(t)]

    def release(self, t: Array) -> None:
        plgpu.barrier_arrive(self.free.at[self.slot(t)])

    def claim(self, t: Array) -> Ref:
        """The tile's place, once its former tile is released; the first round finds it empty."""
        pl.when(t >= self.slots)(lambda: plgpu.barrier_wait(self.free.at[self.slot(t)]))
        return self.tiles.at[self.slot(t)]


def zero_tail(values: Ref, valid: Array) -> None:
    """Zeroes the rows from `valid` on: they may be NaN, and 0 * NaN is NaN."""
    keys, D = values.shape

    @pl.loop(lax.div(valid, jnp.int32(8)), keys // 8)
    def _rows(i: Array) -> None:
        for d in range(0, D, 64):
            part = values.at[pl.ds(pl.multiple_of(i * 8, 8), 8), pl.ds(d, 64)]
            loaded = plgpu.load(part, layout=_ROW_BLOCKS, optimized=False)
            row = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 0, layout=_ROW_BLOCKS)
            part[...] = jnp.where(row < valid - i * 8, loaded, jnp.zeros_like(loaded))

    plgpu.commit_smem()
