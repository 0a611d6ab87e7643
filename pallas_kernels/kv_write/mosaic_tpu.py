"""KV write on TPU: new rows go into their pages of a `token_major` pool, in place.

Memory is written in tiles of 16 tokens, so that a tile that gets only some new tokens is read, merged and written back. Tokens of
one sequence follow each other, so that those of one tile are neighbours and form one group: every tile is touched once, and no
two groups touch the same tile. Several groups are under way at once, which hides the latency of a small copy.

The rows arrive as the numbers that will be stored (quantized numbers are exact in bfloat16): quantization is elementwise and
belongs to the XLA fusion that makes the rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.packed_rows_tpu import row_bits

KERNEL_NAME = "kv_write"
TILE = 16
WINDOW = 2 * TILE
SLOTS = 8
AHEAD = 4


def write_rows(
    pages: Float[Array, "L P page lanes"],
    layer: Int[Array, ""],
    rows: Float[Array, "T lanes"],
    page_ids: Int[Array, " T"],
    offsets: Int[Array, " T"],
    *,
    trash_page: int,
    interpret: Any = False,
) -> Float[Array, "L P page lanes"]:
    """The pool with `rows[t]` at (layer, page_ids[t], offsets[t]). Rows that point at `trash_page` are not written.

    rows: bfloat16, or float32 for a float32 pool, within the range of the pool's dtype. Tokens that share 16 consecutive
    places of a page must be neighbours in order of offset. In place when the pool is donated or carried by a loop.
    """
    T, lanes = rows.shape
    tile_of = page_ids * (pages.shape[2] // TILE) + offsets // TILE
    real = page_ids != trash_page
    before = jnp.concatenate([jnp.full(1, -1, tile_of.dtype), tile_of[:-1]])
    starts_group = real & (tile_of != before)
    group_of = jnp.cumsum(starts_group, dtype=jnp.int32) - 1
    num_groups = (group_of[-1] + 1).reshape(1)
    first = jnp.where(starts_group, group_of, T)
    token = jnp.arange(T, dtype=jnp.int32)
    start = jnp.zeros(T, jnp.int32).at[first].set(token, mode="drop")
    count = jnp.zeros(T, jnp.int32).at[jnp.where(real, group_of, T)].add(1, mode="drop")
    padded = jnp.pad(rows, ((0, -T % TILE + WINDOW), (0, 0)))
    any_space = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        functools.partial(_kernel, dtype=pages.dtype),
        out_shape=jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(1,),
            in_specs=[any_space, any_space],
            out_specs=any_space,
            scratch_shapes=[
                pltpu.VMEM((SLOTS, WINDOW, lanes), rows.dtype),
                pltpu.VMEM((SLOTS, TILE, lanes), pages.dtype),
                pltpu.SemaphoreType.DMA((SLOTS,)),
                pltpu.SemaphoreType.DMA((SLOTS,)),
            ],
        ),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
        name=KERNEL_NAME,
    )
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    written: Array = call(start, count, page_ids, offsets, num_groups, layer, padded, pages)
    return written


def _kernel(
    start: Any,
    count: Any,
    page_ids: Any,
    offsets: Any,
    num_groups: Any,
    layer: Any,
    rows: Any,
    _aliased: Any,
    pages: Any,
    window_buf: Any,
    tile_buf: Any,
    read_sems: Any,
    write_sems: Any,
    *,
    dtype: Any,
) -> None:
    n = num_groups[0]

    def tile_at(i: Any) -> Any:
        token = start[i]
        row = pl.multiple_of(offsets[token] // TILE * TILE, TILE)
        return pages.at[layer[0], page_ids[token], pl.ds(row, TILE)]

    def reads(i: Any) -> list[Any]:
        slot = lax.rem(i, SLOTS)
        window = pl.ds(pl.multiple_of(start[i] // TILE * TILE, TILE), WINDOW)
        return [
            pltpu.make_async_copy(rows.at[window], window_buf.at[slot], read_sems.at[slot]),
            pltpu.make_async_copy(tile_at(i), tile_buf.at[slot], read_sems.at[slot]),
        ]

    def write(i: Any) -> Any:
        slot = lax.rem(i, SLOTS)
        return pltpu.make_async_copy(tile_buf.at[slot], tile_at(i), write_sems.at[slot])

    def begin(i: Any) -> None:
        @pl.when(i >= SLOTS)
        def _() -> None:
            write(i - SLOTS).wait()

        for copy in reads(i):
            copy.start()

    def step(i: Any, carry: None) -> None:  # noqa: ARG001
        @pl.when(i + AHEAD < n)
        def _() -> None:
            begin(i + AHEAD)

        for copy in reads(i):
            copy.wait()
        slot = lax.rem(i, SLOTS)
        token = start[i]
        place = lax.rem(offsets[token], TILE)
        # Rotate the window so that the group's first row comes to its place in the tile.
        shift = lax.rem(place - lax.rem(token, TILE) + WINDOW, WINDOW)
        moved = pltpu.roll(window_buf[slot].astype(jnp.float32), shift, 0)[:TILE].astype(dtype)
        new, old = pltpu.bitcast(moved, jnp.int32), pltpu.bitcast(tile_buf[slot], jnp.int32)
        mask = row_bits(new.shape, TILE // new.shape[0], place, place + count[i])
        tile_buf[slot] = pltpu.bitcast((new & mask) | (old & ~mask), dtype)
        write(i).start()

    lax.fori_loop(0, jnp.minimum(n, AHEAD), lambda i, _: begin(i), None)
    lax.fori_loop(0, n, step, None)
    lax.fori_loop(jnp.maximum(n - SLOTS, 0), n, lambda i, _: write(i).wait(), None)
