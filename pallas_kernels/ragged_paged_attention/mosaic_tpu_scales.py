"""Scales per token and head inside the TPU kernels: rows of the pool become factors of score matrices.

In the pool, a page holds the rows k_0, v_0, k_1, v_1, ... with one scale per token along the lanes, so that the buffer's row
`2 h` holds the key scales of head `h` for the whole block. For FP8, whose tokens are widened even ones first, the rows lie
[64 even | 64 odd] per 128 tokens, and are brought to [all even | all odd] of the block by rotations of half a register.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import Numbers
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import LANES, Plan


def scratch_shapes(plan: Plan, numbers: Numbers) -> list[Any]:
    """Scratch that the scales of the blocks in flight need: their buffer and, for FP8, one block in column order."""
    rows = 2 * plan.num_kv_heads
    shapes = [pltpu.VMEM((plan.slots, rows, plan.block_tokens), jnp.float32)]
    if numbers.permuted:
        shapes.append(pltpu.VMEM((rows, plan.block_tokens), jnp.float32))
    return shapes


@dataclasses.dataclass(frozen=True)
class TokenScales:
    """buffer: VMEM [slots, 2 K, block]. ordered: VMEM [2 K, block] of the block in use, FP8 only."""

    plan: Plan
    buffer: Any
    ordered: Any | None

    def order(self, slot: jax.Array, start: Any, width: int) -> None:
        """Brings the scales of tokens [start, start + width) of a block to the order of the columns of their scores.

        Call before `rows` and `row` of the same tokens. start: a multiple of 256, as is width.
        """
        if self.ordered is None:
            return
        half = width // 2
        left = lax.broadcasted_iota(jnp.int32, (2 * self.plan.num_kv_heads, LANES), 1) < LANES // 2
        for at in range(0, half, LANES):
            first = self.buffer[slot, :, _lanes(start, 2 * at, LANES)]
            second = self.buffer[slot, :, _lanes(start, 2 * at + LANES, LANES)]
            self.ordered[:, at : at + LANES] = jnp.where(left, first, pltpu.roll(second, LANES // 2, 1))
            self.ordered[:, half + at : half + at + LANES] = jnp.where(left, pltpu.roll(first, LANES // 2, 1), second)

    def row(self, slot: jax.Array, head: Any, start: Any, width: int, *, values: bool) -> jax.Array:
        """Scales [1, width] of the keys or the values of one head."""
        at = pl.ds(2 * head + int(values), 1)
        if self.ordered is None:
            found: jax.Array = self.buffer[slot, at, _lanes(start, 0, width)]
        else:
            found = self.ordered[at, :width]
        return found

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


def _lanes(start: Any, offset: int, width: int) -> Any:
    return pl.ds(start + offset if isinstance(start, int) else pl.multiple_of(start + offset, LANES), width)
