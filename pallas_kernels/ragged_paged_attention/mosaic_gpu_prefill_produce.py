"""The producing warpgroup of the Hopper prefill kernel: queries and pages to shared memory, 8-bit pages to 16 bits.

Pages come by TMA, tiles ahead of their use. Of an 8-bit pool the same warpgroup converts each tile as it arrives: a fourth one
would leave every thread 128 registers where the kernel starts, and the consumers spill.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.memory import ROW_BLOCKS, Ref
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.hopper.warpgroups import CONSUMERS, ROWS
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import copy_tile
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_call import Call, Item


def produce(call: Call) -> None:
    """Copies queries, and the pages of keys and values into the rings that the consumers read."""

    def visit(index: Array, before: Array, item: Item, carry: None) -> None:
        def tile(j: Array, t: Array) -> Array:
            _fetch(call, item, j, t, claim=True)
            # After the first tile, whose slot is free before the queries' is.
            pl.when(j == item.low)(lambda: _load_queries(call, index, item))
            return t + 1

        lax.fori_loop(item.low, item.high, tile, before)
        return carry

    _drain(call, call.stored(), call.for_items(visit))


def produce_converted(call: Call) -> None:
    """Copies queries and pages, and converts each tile as it arrives.

    Fetching is one slot less than the ring ahead of converting, so that its slot is always one that was converted already.
    """

    def visit(index: Array, before: Array, item: Item, ahead: Any) -> Any:
        def tile(j: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            t, *next_fetch = carry
            ahead = _fetch_next(call, *next_fetch)
            # Now the consumers have all that they need to end the last item, and to give up its queries.
            pl.when(j == item.low)(lambda: _load_queries(call, index, item))
            _convert(call, item, j, t)
            return (t + 1, *ahead)

        _, *ahead = lax.fori_loop(item.low, item.high, tile, (before, *ahead))
        return tuple(ahead)

    start = (jnp.int32(0), jnp.int32(0), jnp.int32(0), call.is_item(jnp.int32(0)))
    ahead = lax.fori_loop(0, call.tuning.stages - 1, lambda _, ahead: _fetch_next(call, *ahead), start)
    _drain(call, call.converted(), call.for_items(visit, ahead))


def _drain(call: Call, rings: Iterable[Ring], total: Array) -> None:
    """Waits for the consumers to release the last of `total` tiles and queries: the interpreter of JAX 0.11 insists."""
    for ring in rings:
        ring.drain(total)
    for wg in range(CONSUMERS):
        pl.when(total > 0)(lambda wg=wg: plgpu.barrier_wait(call.scratch["queries"].at[CONSUMERS + wg]))


def _fetch_next(call: Call, index: Array, step: Array, t: Array, more: Array) -> tuple[Array, Array, Array, Array]:
    """Starts the copies of tile number t, the step-th of item `index`, if there are more; returns the next one's numbers."""

    def fetch() -> tuple[Array, Array, Array, Array]:
        item = call.item(index)
        _fetch(call, item, item.low + step, t, claim=False)
        ends = item.low + step + 1 == item.high
        following = jnp.where(ends, index + 1, index)
        return following, jnp.where(ends, 0, step + 1), t + 1, call.is_item(following)

    return lax.cond(more, fetch, lambda: (index, step, t, more))


def _fetch(call: Call, item: Item, j: Array, t: Array, *, claim: bool) -> None:
    """Starts the copies of the item's key tile j into the slots of tile number t. claim: waits until they are free."""
    spec = call.spec
    dynamic = spec.scales == "token"
    layer_row = call.layer[0] * call.num_pages
    for which, (name, ring) in enumerate(zip("kv", call.stored(), strict=True)):
        copy_tile(
            spec,
            pool=call.pool,
            scales=call.scales if dynamic else None,
            first_row=lambda page, which=which: ((layer_row + page) * 2 + which) * spec.num_kv_heads + item.kv_head,
            page_ids=call.table.at[item.sequence],
            key0=j * call.tuning.keys,
            kv_len=item.kv_len,
            tile=ring.claim(t) if claim else ring.at(t),
            tile_scales=call.scratch[f"{name}_scale"].at[ring.slot(t)] if dynamic else None,
            barrier=ring.filling(t),
        )


def _load_queries(call: Call, index: Array, item: Item) -> None:
    """Brings the item's queries to shared memory, through registers: TMA would need rows aligned to 8."""
    span, D, s = call.shape.span, call.spec.head_dim, call.scratch
    rows = min(span, 2048 // D)
    together = 2048 // (rows * D)
    for wg in range(CONSUMERS):
        row, *_ = call.rows_of(item, wg)
        pl.when(index > 0)(lambda wg=wg: plgpu.barrier_wait(s["queries"].at[CONSUMERS + wg]))

        @pl.loop(0, ROWS // (rows * together))
        def _some(i: Array, wg: int = wg, row: Array = row) -> None:
            loaded = []
            for k in range(together):
                at = pl.multiple_of((i * together + k) * rows, rows)
                head, token = lax.div(at, jnp.int32(span)), lax.rem(at, jnp.int32(span))
                source = call.q.at[pl.ds(row + token, rows), item.head + head]
                loaded.append((at, plgpu.load(source, layout=ROW_BLOCKS, optimized=False)))
            for at, block in loaded:
                s["q_smem"].at[wg, pl.ds(at, rows)][...] = block

        plgpu.commit_smem()
        plgpu.barrier_arrive(s["queries"].at[wg])


def _convert(call: Call, item: Item, j: Array, t: Array) -> None:
    """Turns tile number t into 16 bits, with token scales applied and rows beyond the sequence's end as zeros."""
    spec, keys = call.spec, call.tuning.keys
    for name, stored, converted in zip("kv", call.stored(), call.converted(), strict=True):
        source, target = stored.wait(t), converted.claim(t)
        scales = call.scratch[f"{name}_scale"].at[stored.slot(t)] if spec.scales == "token" else None

        @pl.loop(0, (keys // 64) * (spec.head_dim // 64))
        def _block(i: Array, source: Ref = source, target: Ref = target, scales: Ref | None = scales) -> None:
            row = pl.multiple_of(lax.rem(i, jnp.int32(keys // 64)) * 64, 64)
            column = pl.multiple_of(lax.div(i, jnp.int32(keys // 64)) * 64, 64)
            _convert_block(call, source, target, scales, row, column, item.kv_len - j * keys)

        plgpu.commit_smem()
        converted.publish(t)


def _convert_block(
    call: Call, source: Ref, target: Ref, scales: Ref | None, row: Array, column: Array, valid: Array
) -> None:
    """64 x 64 numbers of a tile, of which the first `valid` rows are the sequence's."""
    dtype = call.spec.compute_dtype
    rows, columns = pl.ds(row, 64), pl.ds(column, 64)
    layout = plgpu.Layout.SMEM_GMEM_COPY((64, 64), dtype, 128)
    values = plgpu.load(source.at[rows, columns], layout=layout, optimized=False).astype(dtype)
    if scales is not None:
        scale = plgpu.load(scales.at[rows], layout=layout.reduce(1), optimized=False)
        values = (values.astype(jnp.float32) * lax.broadcast_in_dim(scale, values.shape, [0])).astype(dtype)
    number = row + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
    target.at[rows, columns][...] = jnp.where(number < valid, values, jnp.zeros_like(values))
