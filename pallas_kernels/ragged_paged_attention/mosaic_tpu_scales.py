"""Scales per token and head inside the TPU kernels: rows of the pool become factors of score matrices.

A tile of scales is what the pool holds for up to 128 tokens of a page (`kv_orders_tpu`): rows of 128 lanes in which `n` heads
(keys and values apart) of a page of 128 / n tokens lie side by side. Needed are rows of one head and 128 tokens of a block. That is a
transposition of n x n pieces, done in registers: tiles of neighbouring pages lie in different registers, at the same place, and
swap pieces in log2(n) steps of rotation and selection. A register holds tiles that are n pages apart, so that it is
full for any number of heads.

FP8 is widened even tokens first: tiles hold those first, and pairs of neighbouring tiles are sorted into even and odd ones
before they are transposed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_orders_tpu import scale_rows
from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import Numbers
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import LANES, Plan


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """How the scales of a KV block lie in VMEM: tile after tile, [parity][place in column][column] of them.

    tokens: of a tile. heads: that share a row. rows: of a tile. parities: 2 where even and odd tiles lie apart, else 1.
    columns: of `parities * 128` tokens, in a block.
    """

    tokens: int
    heads: int
    rows: int
    parities: int
    columns: int

    @property
    def block_rows(self) -> int:
        return self.parities * self.heads * self.columns * self.rows

    @property
    def in_order(self) -> bool:
        """Whether rows are used as they come: one head each, tokens in order."""
        return self.heads == 1 and self.parities == 1

    def row_of_tile(self, tile: Any) -> Any:
        """The first row of a block's tile, counted in order of its tokens."""
        place = tile >> (self.parities - 1)
        column = place >> (self.heads.bit_length() - 1)
        return self.row(tile & (self.parities - 1), place & (self.heads - 1), column)

    def row(self, parity: Any, place: Any, column: Any) -> Any:
        return ((parity * self.heads + place) * self.columns + column) * self.rows


def tiling_of(plan: Plan, numbers: Numbers) -> Tiling:
    tokens, parities = min(plan.page_size, LANES), 2 if numbers.permuted else 1
    rows = scale_rows(plan.page_size, plan.num_kv_heads)
    return Tiling(tokens, LANES // tokens, rows, parities, plan.block_tokens // LANES // parities)


def scratch_shapes(plan: Plan, numbers: Numbers) -> list[Any]:
    """Scratch that the scales of the blocks in flight need: their buffer and, unless used as they come, one block in order."""
    tiling = tiling_of(plan, numbers)
    shapes = [pltpu.VMEM((plan.slots, tiling.block_rows, LANES), jnp.float32)]
    if not tiling.in_order:
        shapes.append(pltpu.VMEM((tiling.block_rows, LANES), jnp.float32))
    return shapes


def streamed_scales(plan: Plan, numbers: Numbers, pool: Any, buffer: Any, ordered: Any = None) -> TokenScales:
    """From the pool's scales and references to scratch of `scratch_shapes`."""
    return TokenScales(plan, tiling_of(plan, numbers), pool, buffer, ordered)


@dataclasses.dataclass(frozen=True)
class TokenScales:
    """pool: HBM [L, P, rows, 128]. buffer: VMEM [slots, rows of a block, 128]. ordered: VMEM [rows of a block, 128] or None."""

    plan: Plan
    tiling: Tiling
    pool: Any
    buffer: Any
    ordered: Any | None

    def copies(self, layer: Any, page_id: Any, j: Any, slot: Any, sem: Any) -> list[Any]:
        """The copies that bring the scales of page `page_id` to place `j` of a slot."""
        rows, parts = self.tiling.rows, self.plan.page_size // self.tiling.tokens
        copies = []
        for part in range(parts):
            source = self.pool.at[layer, page_id, pl.ds(part * rows, rows)]
            target = self.buffer.at[slot, pl.ds(self.tiling.row_of_tile(j * parts + part), rows)]
            copies.append(pltpu.make_async_copy(source, target, sem))
        return copies

    def order(self, slot: jax.Array, start: Any, width: int) -> None:
        """Brings the scales of tokens [start, start + width) of a block to the order of the columns of their scores.

        Call before `rows` and `row` of the same tokens. start: a multiple of 256, as is width.
        """
        if self.ordered is None:
            return
        tiling = self.tiling
        first, count = self._columns(start, width)

        def load(parity: int, place: int) -> jax.Array:
            loaded: jax.Array = self.buffer[slot, pl.ds(tiling.row(parity, place, first), count * tiling.rows)]
            return loaded

        by_parity = [[load(parity, place) for place in range(tiling.heads)] for parity in range(tiling.parities)]
        if tiling.parities == 2:
            by_parity = _even_and_odd(by_parity[0], by_parity[1], tiling.tokens)
        for parity, registers in enumerate(by_parity):
            for place, register in enumerate(_transpose(registers, tiling.tokens)):
                self.ordered[pl.ds(tiling.row(parity, place, 0), count * tiling.rows)] = register

    def row(self, slot: jax.Array, head: Any, start: Any, width: int, *, values: bool) -> jax.Array:
        """Scales [1, width] of the keys or the values of one head."""
        tiling = self.tiling
        index = 2 * head + int(values)
        place, row = index & (tiling.heads - 1), index >> (tiling.heads.bit_length() - 1)
        first, count = self._columns(start, width)

        def load(parity: int, column: int) -> Any:
            if self.ordered is None:
                return self.buffer[slot, pl.ds(tiling.row(0, 0, first + column) + row, 1)]
            return self.ordered[pl.ds(tiling.row(parity, place, column) + row, 1)]

        parts = [load(parity, column) for parity in range(tiling.parities) for column in range(count)]
        return jnp.concatenate(parts, axis=1)

    def rows(self, slot: jax.Array, group: int, start: Any, width: int, *, values: bool) -> jax.Array:
        """Scales [rows, width] of a group of heads: each head's, once for every query row of it."""
        plan = self.plan
        first = group * plan.heads_per_group
        shape = (plan.rows, width)
        head_of_row = lax.broadcasted_iota(jnp.int32, shape, 0) // plan.queries_per_kv
        result = jnp.broadcast_to(self.row(slot, first, start, width, values=values), shape)
        for j in range(1, plan.heads_per_group):
            row = self.row(slot, first + j, start, width, values=values)
            result = jnp.where(head_of_row == j, row, result)
        return result

    def _columns(self, start: Any, width: int) -> tuple[Any, int]:
        """The first column of a stretch of tokens and their number."""
        tokens = self.tiling.parities * LANES
        return start // tokens, width // tokens


def _even_and_odd(first: list[jax.Array], second: list[jax.Array], tokens: int) -> list[list[jax.Array]]:
    """Registers of even tokens, those of the first tile before those of the second, and of odd ones."""
    half = tokens // 2
    left = _lane(first[0]) % tokens < half
    even = [jnp.where(left, a, pltpu.roll(b, half, 1)) for a, b in zip(first, second, strict=True)]
    odd = [jnp.where(left, pltpu.roll(a, LANES - half, 1), b) for a, b in zip(first, second, strict=True)]
    return [even, odd]


def _transpose(registers: list[jax.Array], tokens: int) -> list[jax.Array]:
    """Piece j of `tokens` lanes of result i is piece i of register j."""
    count = len(registers)
    step = count // 2
    while step:
        low = _lane(registers[0]) // tokens & step == 0
        swapped = list(registers)
        for i in range(count):
            if i & step == 0:
                a, b = registers[i], registers[i + step]
                swapped[i] = jnp.where(low, a, pltpu.roll(b, step * tokens, 1))
                swapped[i + step] = jnp.where(low, pltpu.roll(a, LANES - step * tokens, 1), b)
        registers = swapped
        step //= 2
    return registers


def _lane(x: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)
