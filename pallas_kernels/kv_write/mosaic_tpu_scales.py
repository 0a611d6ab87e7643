"""Scales per token and head on their way into the pool, inside the TPU's KV write.

A piece is what the pool holds of up to 128 tokens of a page (`kv_orders_tpu`): rows of 128 lanes, tokens along the lanes. XLA lays
the new scales out the same way, by their place in the step: what a piece gets of them are neighbouring lanes, which rotate
to their places. In an FP8 pool a piece has its even tokens first; the tokens of the step are split likewise, and each half of them
goes to one half of the piece.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.kv_orders_tpu import LANES, SUBLANES, scale_rows


def piece_tokens(page_size: int) -> int:
    return min(page_size, LANES)


def halves_of(dtype: Any) -> int:
    """2 where a piece has even tokens before odd ones."""
    return 2 if jnp.dtype(dtype).name.startswith("float8") else 1


def by_lanes(
    scales: Float[Array, "T heads"], page_size: int, halves: int
) -> Float[Array, "halves blocks heads_per_row rows lanes"]:
    """New scales with tokens along the lanes, rows as in a piece but each head by itself, filled up to whole registers.

    `heads` counts keys and values apart. Another block of lanes follows the last one, so that two can always be read.
    """
    T, heads = scales.shape
    per_row, rows = LANES // piece_tokens(page_size), scale_rows(page_size, heads // 2)
    block = halves * LANES
    padded = jnp.pad(scales, ((0, -T % block + block), (0, rows * per_row - heads)))
    apart = padded.reshape(-1, LANES, halves, rows, per_row).transpose(2, 0, 4, 3, 1)
    return jnp.pad(apart, ((0, 0), (0, 0), (0, 0), (0, -rows % SUBLANES), (0, 0)))


def merged(piece: jax.Array, fresh: Any, start: Any, count: Any, place: Any, tokens: int) -> jax.Array:
    """A piece of `tokens` tokens that has from `place` on the scales of the step's tokens [start, start + count).

    piece: [rows, lanes], rows filled up to whole registers. fresh: a reference to what `by_lanes` makes.
    """
    halves, _, per_row = fresh.shape[:3]
    lane = lax.broadcasted_iota(jnp.int32, piece.shape, 1)
    for half in range(halves):
        # The first of the step's tokens in this half that belongs to the piece, where it goes, and how many follow.
        source = lax.div(start - half + halves - 1, halves)
        skipped = source * halves + half - start
        offset = place + skipped
        target = lax.rem(offset, halves) * (tokens // halves) + lax.div(offset, halves)
        number = lax.div(count - skipped + halves - 1, halves)
        block, first = lax.div(source, LANES), lax.rem(source, LANES)
        for head in range(per_row):
            distance = lane - (head * tokens + target)
            shift = lax.rem(head * tokens + target - first + LANES, LANES)
            here, beyond = (pltpu.roll(fresh[half, block + i, head], shift, 1) for i in range(2))
            moved = jnp.where(distance + first < LANES, here, beyond)
            piece = jnp.where((distance >= 0) & (distance < number), moved, piece)
    return piece
