"""Scales per token and head inside the TPU kernels: rows of the pool become factors of score matrices.

In the pool, a page holds the rows k_0, v_0, k_1, v_1, ... (one scale per token along the lanes). A page of at least 128
tokens is copied so that row `2 h` of the buffer holds the key scales of head `h` for all tokens of the block.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import Numbers
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import Plan


def scale_rows(plan: Plan) -> list[Any]:
    """Scratch that the scales of the blocks in flight need."""
    return [pltpu.VMEM((plan.slots, 2 * plan.num_kv_heads, plan.block_tokens), jnp.float32)]


def expand_token_scales(
    scale_buf: Any, scratch: Any, slot: Any, plan: Plan, numbers: Numbers, group: int, *, values: bool
) -> jax.Array:
    """Scales [rows, block] of a group: row r is that of its head, repeated for the head's queries."""
    del scratch, numbers
    first = group * plan.heads_per_group
    picks = [2 * head + int(values) for head in range(first, first + plan.heads_per_group)]
    repeated = [
        jnp.broadcast_to(scale_buf[slot, row : row + 1, :], (plan.queries_per_kv, plan.block_tokens)) for row in picks
    ]
    missing = plan.rows - plan.heads_per_group * plan.queries_per_kv
    if missing:
        repeated.append(jnp.ones((missing, plan.block_tokens), jnp.float32))
    return jnp.concatenate(repeated, axis=0) if len(repeated) > 1 else repeated[0]


def token_scale_row(
    scale_buf: Any, slot: Any, plan: Plan, numbers: Numbers, head: Any, *, values: bool
) -> jax.Array:
    """Scales [1, block] of one head."""
    del plan, numbers
    row: jax.Array = scale_buf[slot, pl.ds(2 * head + int(values), 1), :]
    return row
