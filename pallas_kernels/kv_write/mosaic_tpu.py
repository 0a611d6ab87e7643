"""KV write on TPU: new rows, and their scales, go into their pages of a `token_major` pool, in place.

Memory is written in tiles: 16 tokens of rows, or the scales of up to 128 tokens of a page. A tile that gets only some new
tokens is read, merged and written back. Tokens of one sequence follow each other, so that those of one tile are neighbours and form one
group: every tile is touched once, and no two groups touch the same tile. Several groups are under way at once, which
hides the latency of a small copy.

The rows arrive as the numbers that will be stored (quantized numbers are exact in bfloat16): quantization is elementwise and
belongs to the XLA fusion that makes the rows. Scales do not go through XLA's scatter: on a TPU that moves a tile of 4 KiB there and back
for each single number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_orders_tpu import LANES, SUBLANES, scale_rows
from pallas_kernels.kv_write import mosaic_tpu_scales as of_scales
from pallas_kernels.packed_rows_tpu import row_bits

KERNEL_NAME = "kv_write"
TILE = 16
WINDOW = 2 * TILE
SLOTS = 8
AHEAD = 4


def write(
    pages: Float[Array, "L P page lanes"],
    pool_scales: Float[Array, "L P rows 128"] | None,
    layer: Int[Array, ""],
    rows: Float[Array, "T lanes"],
    scales: Float[Array, "T heads"] | None,
    page_ids: Int[Array, " T"],
    offsets: Int[Array, " T"],
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "L P page lanes"], Float[Array, "L P rows 128"] | None]:
    """The pool with `rows[t]`, and its scales with `scales[t]`, at (layer, page_ids[t], offsets[t]).

    What points at the last page is not written. rows: bfloat16, or float32 for a float32 pool, within the range of the pool's
    dtype. scales: None unless they are per token; of each head its key's, then its value's. Tokens that share a tile must be
    neighbours in order of offset. In place when the pool is donated or carried by a loop.
    """
    T, lanes = rows.shape
    num_pages, page_size = pages.shape[1:3]
    tiles = [TILE]
    new: list[Array] = [jnp.pad(rows, ((0, -T % TILE + WINDOW), (0, 0)))]
    pool: list[Array] = [pages]
    scratch = [[pltpu.VMEM((SLOTS, WINDOW, lanes), rows.dtype), *_slots((TILE, lanes), pages.dtype)]]
    if pool_scales is not None and scales is not None:
        in_piece = scale_rows(page_size, scales.shape[1] // 2)
        tiles.append(of_scales.piece_tokens(page_size))
        new.append(of_scales.by_lanes(scales, page_size, of_scales.halves_of(pages.dtype)))
        pool.append(pool_scales)
        scratch.append(_slots((-(-in_piece // SUBLANES) * SUBLANES, LANES), pool_scales.dtype))
    groups = [_groups(page_ids, offsets, tile, page_size, num_pages - 1) for tile in tiles]
    in_hbm, in_vmem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    first_of_pool = 3 * len(groups) + 3 + len(new)
    call = pl.pallas_call(
        functools.partial(_kernel, tiles=tiles, num_heads=0 if scales is None else scales.shape[1] // 2),
        out_shape=([jax.ShapeDtypeStruct(part.shape, part.dtype) for part in pool],),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(1,),
            in_specs=[[in_hbm, in_vmem][: len(new)], [in_hbm] * len(pool)],
            out_specs=([in_hbm] * len(pool),),
            scratch_shapes=scratch,
        ),
        input_output_aliases={first_of_pool + i: i for i in range(len(pool))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
        name=KERNEL_NAME,
    )
    [written] = call(groups, page_ids, offsets, jnp.asarray(layer, jnp.int32).reshape(1), new, pool)
    return written[0], written[1] if len(written) == 2 else pool_scales


def _slots(shape: tuple[int, ...], dtype: Any) -> list[Any]:
    """A tile of each group under way, and semaphores of its copies in and out."""
    return [pltpu.VMEM((SLOTS, *shape), dtype), pltpu.SemaphoreType.DMA((SLOTS,)), pltpu.SemaphoreType.DMA((SLOTS,))]


def _groups(
    page_ids: Int[Array, " T"], offsets: Int[Array, " T"], tile: int, page_size: int, trash_page: int
) -> tuple[Int[Array, " T"], Int[Array, " T"], Int[Array, " one"]]:
    """First token and number of tokens of each group, and how many groups there are."""
    T = page_ids.shape[0]
    tile_of = page_ids * (page_size // tile) + offsets // tile
    real = page_ids != trash_page
    before = jnp.concatenate([jnp.full(1, -1, tile_of.dtype), tile_of[:-1]])
    starts_group = real & (tile_of != before)
    group_of = jnp.cumsum(starts_group, dtype=jnp.int32) - 1
    first = jnp.where(starts_group, group_of, T)
    start = jnp.zeros(T, jnp.int32).at[first].set(jnp.arange(T, dtype=jnp.int32), mode="drop")
    count = jnp.zeros(T, jnp.int32).at[jnp.where(real, group_of, T)].add(1, mode="drop")
    return start, count, group_of[-1:] + 1


@dataclass(frozen=True)
class _Pass:
    """Groups 0 to `number`: their tiles are read, changed and written back.

    reads(i, slot), write(i, slot): the copies of a group. change(i, slot): what is done in between.
    """

    number: Any
    reads: Callable[[Any, Any], Sequence[Any]]
    change: Callable[[Any, Any], None]
    write: Callable[[Any, Any], Any]

    def begin(self, i: Any) -> None:
        @pl.when(i >= SLOTS)
        def _() -> None:
            self.write(i - SLOTS, lax.rem(i, SLOTS)).wait()

        for copy in self.reads(i, lax.rem(i, SLOTS)):
            copy.start()

    def start(self) -> None:
        lax.fori_loop(0, jnp.minimum(self.number, AHEAD), lambda i, _: self.begin(i), None)

    def run(self) -> None:
        def step(i: Any, carry: None) -> None:  # noqa: ARG001
            pl.when(i + AHEAD < self.number)(lambda: self.begin(i + AHEAD))
            slot = lax.rem(i, SLOTS)
            for copy in self.reads(i, slot):
                copy.wait()
            self.change(i, slot)
            self.write(i, slot).start()

        lax.fori_loop(0, self.number, step, None)

    def finish(self) -> None:
        first = jnp.maximum(self.number - SLOTS, 0)
        lax.fori_loop(first, self.number, lambda i, _: self.write(i, lax.rem(i, SLOTS)).wait(), None)


def _kernel(
    groups: Any,
    page_ids: Any,
    offsets: Any,
    layer: Any,
    new: Any,
    _aliased: Any,
    pool: Any,
    *scratch: Any,
    tiles: list[int],
    num_heads: int,
) -> None:
    places = (page_ids, offsets, layer)
    passes = [_rows_pass(groups[0], *places, new[0], pool[0], *scratch[0])]
    if num_heads:
        passes.append(
            _scales_pass(groups[1], *places, new[1], pool[1], *scratch[1], tokens=tiles[1], num_heads=num_heads)
        )
    for one in passes:
        one.start()
    for one in passes:
        one.run()
    for one in passes:
        one.finish()


def _rows_pass(
    group: Any,
    page_ids: Any,
    offsets: Any,
    layer: Any,
    rows: Any,
    pages: Any,
    window_buf: Any,
    tile_buf: Any,
    read_sems: Any,
    write_sems: Any,
) -> _Pass:
    start, count, number = group
    dtype = pages.dtype

    def tile_at(i: Any) -> Any:
        token = start[i]
        row = pl.multiple_of(offsets[token] // TILE * TILE, TILE)
        return pages.at[layer[0], page_ids[token], pl.ds(row, TILE)]

    def reads(i: Any, slot: Any) -> list[Any]:
        window = pl.ds(pl.multiple_of(start[i] // TILE * TILE, TILE), WINDOW)
        return [
            pltpu.make_async_copy(rows.at[window], window_buf.at[slot], read_sems.at[slot]),
            pltpu.make_async_copy(tile_at(i), tile_buf.at[slot], read_sems.at[slot]),
        ]

    def change(i: Any, slot: Any) -> None:
        token = start[i]
        place = lax.rem(offsets[token], TILE)
        # Rotate the window so that the group's first row comes to its place in the tile.
        shift = lax.rem(place - lax.rem(token, TILE) + WINDOW, WINDOW)
        moved = pltpu.roll(window_buf[slot].astype(jnp.float32), shift, 0)[:TILE].astype(dtype)
        fresh, old = pltpu.bitcast(moved, jnp.int32), pltpu.bitcast(tile_buf[slot], jnp.int32)
        mask = row_bits(fresh.shape, TILE // fresh.shape[0], place, place + count[i])
        tile_buf[slot] = pltpu.bitcast((fresh & mask) | (old & ~mask), dtype)

    def write(i: Any, slot: Any) -> Any:
        return pltpu.make_async_copy(tile_buf.at[slot], tile_at(i), write_sems.at[slot])

    return _Pass(number[0], reads, change, write)


def _scales_pass(
    group: Any,
    page_ids: Any,
    offsets: Any,
    layer: Any,
    fresh: Any,
    scales: Any,
    buf: Any,
    read_sems: Any,
    write_sems: Any,
    *,
    tokens: int,
    num_heads: int,
) -> _Pass:
    start, count, number = group
    rows = scale_rows(tokens, num_heads)

    def piece_at(i: Any) -> Any:
        token = start[i]
        return scales.at[layer[0], page_ids[token], pl.ds(offsets[token] // tokens * rows, rows)]

    def reads(i: Any, slot: Any) -> list[Any]:
        return [pltpu.make_async_copy(piece_at(i), buf.at[slot, pl.ds(0, rows)], read_sems.at[slot])]

    def change(i: Any, slot: Any) -> None:
        place = lax.rem(offsets[start[i]], tokens)
        buf[slot] = of_scales.merged(buf[slot], fresh, start[i], count[i], place, tokens)

    def write(i: Any, slot: Any) -> Any:
        return pltpu.make_async_copy(buf.at[slot, pl.ds(0, rows)], piece_at(i), write_sems.at[slot])

    return _Pass(number[0], reads, change, write)
