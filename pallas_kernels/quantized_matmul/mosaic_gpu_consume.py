"""The consuming warpgroups of the Hopper matmul: products of 64 rows each, summed over the steps and scaled."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.memory import Ref
from pallas_kernels.hopper.warpgroups import COLUMN, ROW, ROWS, WGMMA
from pallas_kernels.mosaic_gpu_store import store
from pallas_kernels.quantized_matmul.mosaic_gpu_call import Call, Part


def consume(call: Call, part: Part, wg: Array) -> None:
    """The result of one warpgroup's rows, or one split's part of it."""
    kernel = call.kernel
    rows = Rows(call, part, pl.multiple_of(wg * ROWS, ROWS))
    add = rows.add_group if kernel.is_int4 else rows.add_products
    start = plgpu.layout_cast(jnp.zeros(rows.shape, kernel.accumulate), WGMMA)
    acc = lax.fori_loop(0, part.count, add, start)
    if kernel.splits == 1 and not kernel.is_int4:
        scales = call.scales.at[part.layer, part.columns]
        acc = acc.astype(jnp.float32) * rows.per_row(call.of_rows.at[rows.tokens]) * rows.per_output(scales)
    store(call.result.at[part.split, rows.tokens, part.columns], acc.astype(call.result.dtype))


@dataclass(frozen=True)
class Rows:
    """One warpgroup's rows, from `row` of the block on."""

    call: Call
    part: Part
    row: Array

    @property
    def shape(self) -> tuple[int, int]:
        return ROWS, self.call.kernel.outputs

    @property
    def tokens(self) -> pl.Slice:
        return pl.ds(pl.multiple_of(self.part.token + self.row, ROWS), ROWS)

    def per_output(self, ref: Ref) -> Array:
        """Numbers of the outputs in global memory, for every row."""
        loaded = plgpu.load(ref, layout=COLUMN, optimized=False).astype(jnp.float32)
        return lax.broadcast_in_dim(loaded, self.shape, [1])

    def per_row(self, ref: Ref) -> Array:
        """Numbers of the rows in global memory, for every output."""
        return lax.broadcast_in_dim(plgpu.load(ref, layout=ROW, optimized=False), self.shape, [0])

    def add_products(self, i: Array, acc: Array) -> Array:
        """The sums with those of step i."""
        x_ring, w_ring = self.call.rings
        product = self.multiply(x_ring.at(i), w_ring.wait(i))
        x_ring.release(i)
        return acc + product

    def add_group(self, i: Array, acc: Array) -> Array:
        """The sums with those of step i, a group of int4 weights: its zero point and its scale are applied to its products."""
        call, part, step = self.call, self.part, self.part.first + i
        assert call.zeros is not None
        # Loads from global memory: on their way while the tile is.
        factors = self.per_output(call.scales.at[part.layer, step, part.columns])
        sums = self.per_row(call.of_rows.at[step, self.tokens])
        off = sums * self.per_output(call.zeros.at[part.layer, step, part.columns])
        # Whoever unpacked the weights has seen that the activations are there, too.
        x_ring, _ = call.rings
        product = self.multiply(x_ring.at(i), call.wide.wait(i))
        x_ring.release(i)
        call.wide.release(i)
        return acc + (product - off) * factors

    def multiply(self, x_tile: Ref, w_tile: Ref) -> Array:
        def multiplied(product: Ref) -> Array:
            plgpu.wgmma(product, x_tile.at[pl.ds(self.row, ROWS)], w_tile.transpose((1, 0)))
            return product[...]

        return pl.run_scoped(multiplied, plgpu.ACC(self.shape, self.call.kernel.accumulate))
