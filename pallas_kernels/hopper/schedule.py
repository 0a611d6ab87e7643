"""FlashAttention-3's schedule (Shah et al. 2024) for 64 query rows of a warpgroup.

While the softmax of tile j runs, P V of tile j - 1 is in the tensor cores; Q K^T of tile j was issued just before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.memory import Ref
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.hopper.warpgroups import ROWS, WGMMA

State = tuple[list[Array], Array, Array, Array]
"""Sums of weighted values in parts of columns, running maximum, running sum, weights of the last tile."""


class Rows(Protocol):
    """A warpgroup's rows. dtype: of weights. keys: of a tile. parts: columns of each accumulator of values. rings: of keys, of values.

    sums: shared memory for a number of each row, otherwise unused.
    """

    @property
    def dtype(self) -> Any: ...
    @property
    def keys(self) -> int: ...
    @property
    def parts(self) -> Sequence[int]: ...
    @property
    def rings(self) -> tuple[Ring, Ring]: ...
    @property
    def sums(self) -> Ref: ...

    def number(self, j: Any) -> Array:
        """Of tile j, in the rings."""

    def start_keys(self, out: Ref, j: Array) -> None:
        """Issues Q K^T of tile j, once its keys are there."""

    def softmax(
        self, dots: Array, j: Array, top: Array, total: Array, *, masked: bool
    ) -> tuple[Array, Array, Array, Array]:
        """(top, total, weights, factor by which earlier results shrink) with tile j."""


def first_tile(rows: Rows, j: Array, top: Array, total: Array) -> State:
    """The state after the softmax of the first tile: its values are not added yet."""

    def first(dots_ref: Ref) -> Array:
        rows.start_keys(dots_ref, j)
        return dots_ref[...]

    dots = pl.run_scoped(first, _products(rows))
    rows.rings[0].release(rows.number(j))
    top, total, weights, _ = rows.softmax(dots, j, top, total, masked=True)
    acc = [plgpu.layout_cast(jnp.zeros((ROWS, part), jnp.float32), WGMMA) for part in rows.parts]
    return acc, top, total, weights.astype(rows.dtype)


def next_tile(rows: Rows, j: Array, state: State, *, masked: bool) -> State:
    """Q K^T and softmax of tile j, and meanwhile P V of the tile before."""
    acc, top, total, weights = state
    key_ring, value_ring = rows.rings

    def overlapped(dots_ref: Ref, *acc_refs: Ref) -> State:
        for ref, value in zip(acc_refs, acc, strict=True):
            ref[...] = value
        rows.start_keys(dots_ref, j)
        _add_values(rows, acc_refs, weights, value_ring.wait(rows.number(j - 1)))
        dots = plgpu.wgmma_accumulator_load(dots_ref, wait_n=len(acc_refs))
        key_ring.release(rows.number(j))
        new_top, new_total, new_weights, shrink = rows.softmax(dots, j, top, total, masked=masked)
        # The store is there for its place alone: without a side effect that needs the softmax, ptxas puts the wait
        # for P V before the softmax, which is to run meanwhile. The barrier keeps the conversion after the wait:
        # until then the registers that hold `weights` are being read.
        rows.sums[...] = new_total
        *gained, new_weights = lax.optimization_barrier((*(ref[...] for ref in acc_refs), new_weights))
        value_ring.release(rows.number(j - 1))
        gained = [part * lax.broadcast_in_dim(shrink, part.shape, [0]) for part in gained]
        return gained, new_top, new_total, new_weights.astype(rows.dtype)

    return pl.run_scoped(overlapped, _products(rows), *_accumulators(rows))


def last_values(rows: Rows, acc: list[Array], weights: Array, values: Ref) -> list[Array]:
    """The sums with the last tile's values, which the caller waited for and releases."""

    def last(*acc_refs: Ref) -> list[Array]:
        for ref, value in zip(acc_refs, acc, strict=True):
            ref[...] = value
        _add_values(rows, acc_refs, weights, values)
        return [ref[...] for ref in acc_refs]

    return pl.run_scoped(last, *_accumulators(rows))


def _products(rows: Rows) -> Any:
    return plgpu.WGMMAAccumulatorRef((ROWS, rows.keys), jnp.float32)


def _accumulators(rows: Rows) -> list[Any]:
    return [plgpu.WGMMAAccumulatorRef((ROWS, part), jnp.float32) for part in rows.parts]


def _add_values(rows: Rows, acc_refs: Sequence[Ref], weights: Array, values: Ref) -> None:
    """Issues P V of a tile."""
    begin = 0
    for ref, part in zip(acc_refs, rows.parts, strict=True):
        plgpu.wgmma(ref, weights, values.at[:, pl.ds(begin, part)])
        begin += part
