"""The consuming warpgroups of the Hopper prefill kernel: matmuls and online softmax of 64 query rows each.

FlashAttention-3's schedule (Shah et al. 2024): while the softmax of tile j runs, P V of tile j - 1 is in the tensor cores; Q K^T of
tile j was issued just before it. Tiles that no query of a warpgroup sees are never multiplied, tiles that all see fully are not
masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import NO_LOGIT, Ref, first_visible_key, scaled_dots
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_call import ROW, WGMMA, Call, Item, Ring
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_output import write
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_plan import CONSUMERS, ROWS

_State = tuple[list[Array], Array, Array, Array]
"""Sums of weighted values in parts of up to 128 columns, running maximum, running sum, weights of the last tile."""


def consume(call: Call, wg: Array) -> None:
    """Attention of one warpgroup's 64 rows, item after item."""

    def visit(index: Array, before: Array, item: Item, carry: None) -> None:
        rows = _Rows.of(call, index, before, wg)
        if not call.spec.quantized:
            pl.when(rows.has_tail() & jnp.logical_not(rows.cleans_tail()))(
                lambda: plgpu.barrier_arrive(rows.tail_clean())
            )
        plgpu.barrier_wait(call.scratch["queries"].at[wg])
        lax.fori_loop(item.low, rows.low, rows.skip, None)
        pl.when(rows.tokens > 0)(lambda: write(call, _attend_rows(rows), call.item(index), wg))
        rows = rows.again()
        pl.when(rows.tokens == 0)(rows.release_queries)
        lax.fori_loop(rows.high, rows.item.high, rows.skip, None)
        if not call.spec.quantized:
            waits = (rows.high < rows.item.high) | (rows.tokens == 0)
            pl.when(rows.has_tail() & waits)(lambda: plgpu.barrier_wait(rows.tail_clean()))
        return carry

    call.for_items(visit)


@dataclass(frozen=True)
class _Rows:
    """One warpgroup's rows of an item. They attend to the key tiles [low, high); tile j has the number `number` + j in the rings.

    position: of the first row's token. first, last: positions of the first and last token that is its own. tokens: how many are.
    """

    call: Call
    index: Array
    before: Array
    wg: Array
    item: Item
    number: Array
    position: Array
    first: Array
    last: Array
    tokens: Array
    low: Array
    high: Array

    @staticmethod
    def of(call: Call, index: Array, before: Array, wg: Array) -> _Rows:
        """Those of the block's item `index`, read from global memory. before: tiles before the item."""
        item, keys = call.item(index), jnp.int32(call.tuning.keys)
        _, position, _, tokens = call.rows_of(item, wg)
        first = item.position + wg * call.shape.span
        last = first + tokens - 1
        low = jnp.where(tokens > 0, lax.div(first_visible_key(call.spec, first), keys), item.high)
        high = jnp.where(tokens > 0, lax.div(last, keys) + 1, item.high)
        return _Rows(call, index, before, wg, item, before - item.low, position, first, last, tokens, low, high)

    def again(self) -> _Rows:
        """The same, read again: what is needed after the loops only would otherwise sit in registers during them."""
        return _Rows.of(self.call, self.index, self.before, self.wg)

    @property
    def rings(self) -> tuple[Ring, Ring]:
        return self.call.converted() if self.call.spec.quantized else self.call.stored()

    def skip(self, j: Array, carry: None) -> None:
        """Passes a tile that none of these rows sees."""
        del carry
        for ring in self.rings:
            ring.wait(self.number + j)
            ring.release(self.number + j)

    def release_queries(self) -> None:
        plgpu.barrier_arrive(self.call.scratch["queries"].at[CONSUMERS + self.wg])

    def static_scale(self, which: int) -> Array | None:
        """The scale of keys (0) or values (1), for pools with one per layer and head."""
        call, K = self.call, self.call.spec.num_kv_heads
        if call.spec.scales != "static" or call.scales is None:
            return None
        scale: Array = call.scales[(call.layer[0] * 2 + which) * K + self.item.kv_head]
        return scale

    def start_keys(self, out: Ref, j: Array) -> None:
        """Issues Q K^T of tile j."""
        call = self.call
        # The index is wg, but not to the compiler, which would keep all descriptors of the queries in registers.
        at = self.wg + jnp.where(self.number + j >= 0, 0, 1) if call.spec.head_dim == 256 else self.wg
        keys = self.rings[0].wait(self.number + j)
        plgpu.wgmma(out, call.scratch["q_smem"].at[at], keys.transpose((1, 0)))

    def has_tail(self) -> Array:
        """Whether the item's last tile holds keys beyond the sequence's end."""
        return self.item.high * self.call.tuning.keys > self.item.kv_len

    def cleans_tail(self) -> Array:
        """Whether the warpgroup has the item's last query, so that it surely reads the last tile."""
        span = self.call.shape.span
        return (self.item.tokens > self.wg * span) & (self.item.tokens <= (self.wg + 1) * span)

    def tail_clean(self) -> Ref:
        """The barrier of `_clean_tail`."""
        barrier: Ref = self.call.scratch["free"].at[self.item.opaque(2 * self.call.tuning.stages)]
        return barrier


def _attend_rows(rows: _Rows) -> list[Array]:
    """The output of the rows, in parts of up to 128 columns."""
    call = rows.call
    value_ring = rows.rings[1]
    acc, _, total, weights = _visible_tiles(rows, _first_tile(rows))
    rows = rows.again()
    rows.release_queries()
    values = value_ring.wait(rows.number + rows.high - 1)
    if not call.spec.quantized:
        _clean_tail(rows, values)

    def last(*acc_refs: Ref) -> list[Array]:
        for ref, value in zip(acc_refs, acc, strict=True):
            ref[...] = value
        _add_values(acc_refs, weights, values)
        return [ref[...] for ref in acc_refs]

    acc = pl.run_scoped(last, *_accumulators(call))
    value_ring.release(rows.number + rows.high - 1)
    value_scale = rows.static_scale(1)
    inverse = 1.0 / total if value_scale is None else value_scale / total
    return [(x * lax.broadcast_in_dim(inverse, x.shape, [0])).astype(call.spec.compute_dtype) for x in acc]


def _first_tile(rows: _Rows) -> _State:
    """The state after the first tile's softmax: its values are not added yet."""
    call, j = rows.call, rows.low
    if call.sinks is None:
        top = plgpu.layout_cast(jnp.full((ROWS,), NO_LOGIT, jnp.float32), ROW)
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
    else:
        top = _sinks(call, rows.item.head)
        total = plgpu.layout_cast(jnp.ones((ROWS,), jnp.float32), ROW)

    def first(dots_ref: Ref) -> Array:
        rows.start_keys(dots_ref, j)
        return dots_ref[...]

    dots = pl.run_scoped(first, plgpu.WGMMAAccumulatorRef((ROWS, call.tuning.keys), jnp.float32))
    rows.rings[0].release(rows.number + j)
    top, total, weights, _ = _softmax(rows, dots, j, top, total, masked=True)
    part = min(call.spec.head_dim, 128)
    acc = [plgpu.layout_cast(jnp.zeros((ROWS, part), jnp.float32), WGMMA)] * (call.spec.head_dim // part)
    return acc, top, total, weights.astype(call.spec.compute_dtype)


def _visible_tiles(rows: _Rows, state: _State) -> _State:
    """The state after all further tiles, those in the middle without a mask."""
    N, window = jnp.int32(rows.call.tuning.keys), rows.call.spec.sliding_window

    def unmasked(rows: _Rows) -> tuple[Array, Array]:
        """The tiles [begin, end) that every query of the warpgroup sees, but for the first tile."""
        begin = rows.low + 1
        if window is not None:
            inside = lax.div(jnp.maximum(rows.last - window + N, 0), N)
            begin = jnp.clip(inside, begin, rows.high)
        return begin, jnp.clip(lax.div(rows.first + 1, N), begin, rows.high)

    # Bounds are read again for each loop: they would sit in registers during the loops before.
    if window is not None:
        now = rows
        state = lax.fori_loop(now.low + 1, unmasked(now)[0], lambda j, s: _step(now, j, s, masked=True), state)
        rows = rows.again()
    middle = rows
    state = lax.fori_loop(*unmasked(middle), lambda j, s: _step(middle, j, s, masked=False), state)
    rows = rows.again()
    return lax.fori_loop(unmasked(rows)[1], rows.high, lambda j, s: _step(rows, j, s, masked=True), state)


def _step(rows: _Rows, j: Array, state: _State, *, masked: bool) -> _State:
    """Q K^T and softmax of tile j, and meanwhile P V of the tile before."""
    call = rows.call
    acc, top, total, weights = state
    key_ring, value_ring = rows.rings

    def overlapped(dots_ref: Ref, *acc_refs: Ref) -> _State:
        for ref, value in zip(acc_refs, acc, strict=True):
            ref[...] = value
        rows.start_keys(dots_ref, j)
        _add_values(acc_refs, weights, value_ring.wait(rows.number + j - 1))
        dots = plgpu.wgmma_accumulator_load(dots_ref, wait_n=len(acc_refs))
        key_ring.release(rows.number + j)
        new_top, new_total, new_weights, shrink = _softmax(rows, dots, j, top, total, masked=masked)
        # The store is there for its place alone: without a side effect that needs the softmax, ptxas puts the wait
        # for P V before the softmax, which is to run meanwhile. The barrier keeps the conversion after the wait:
        # until then the registers that hold `weights` are being read.
        call.scratch["sums"].at[rows.wg][...] = new_total
        *gained, new_weights = lax.optimization_barrier((*(ref[...] for ref in acc_refs), new_weights))
        value_ring.release(rows.number + j - 1)
        gained = [part * lax.broadcast_in_dim(shrink, part.shape, [0]) for part in gained]
        return gained, new_top, new_total, new_weights.astype(call.spec.compute_dtype)

    dots_type = plgpu.WGMMAAccumulatorRef((ROWS, call.tuning.keys), jnp.float32)
    return pl.run_scoped(overlapped, dots_type, *_accumulators(call))  # type: ignore[no-any-return]


def _softmax(
    rows: _Rows, dots: Array, j: Array, top: Array, total: Array, *, masked: bool
) -> tuple[Array, Array, Array, Array]:
    """(top, total, weights, factor by which earlier results shrink) with tile j."""
    call = rows.call
    scores, factor = scaled_dots(call.spec, dots, rows.static_scale(0))
    if masked:
        token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=WGMMA) & (call.shape.span - 1)
        # Read, not made by an iota: that would be hoisted out of the loops and fill registers there.
        column = plgpu.load(call.columns, layout=WGMMA.reduce(0), optimized=False)
        behind = (rows.position - j * call.tuning.keys) + token - lax.broadcast_in_dim(column, scores.shape, [1])
        seen = behind >= 0
        if call.spec.sliding_window is not None:
            seen &= behind < call.spec.sliding_window
        scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    return new_top, total * shrink + weights.sum(axis=1), weights, shrink


def _accumulators(call: Call) -> list[Any]:
    """Two at head_dim 256: one `wgmma` has 256 columns at most, and its registers are easier to place in halves."""
    part = min(call.spec.head_dim, 128)
    return [plgpu.WGMMAAccumulatorRef((ROWS, part), jnp.float32)] * (call.spec.head_dim // part)


def _add_values(acc_refs: Sequence[Ref], weights: Array, values: Ref) -> None:
    """Issues P V of a tile."""
    for i, ref in enumerate(acc_refs):
        part = min(values.shape[1], 128)
        plgpu.wgmma(ref, weights, values.at[:, pl.ds(i * part, part)])


def _clean_tail(rows: _Rows, values: Ref) -> None:
    """Zeroes the values beyond the sequence's end in the item's last tile: they may be NaN, and 0 * NaN is NaN.

    One warpgroup does it. The other arrived at the barrier when it began the item, and waits for it before it
    reads that tile, or at the item's end if it does not read it: either way both wait once.
    """
    call, item = rows.call, rows.item
    tail = rows.has_tail()

    @pl.when(tail & rows.cleans_tail())
    def _zero() -> None:
        for d in range(0, call.spec.head_dim, 64):
            part = values.at[:, pl.ds(d, 64)]
            loaded = plgpu.load(part, layout=WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 0, layout=WGMMA)
            valid = item.kv_len - (item.high - 1) * call.tuning.keys
            part[...] = jnp.where(row < valid, loaded, jnp.zeros_like(loaded))
        plgpu.commit_smem()
        plgpu.barrier_arrive(rows.tail_clean())

    pl.when(tail & (rows.high == item.high))(lambda: plgpu.barrier_wait(rows.tail_clean()))


def _sinks(call: Call, head: Array) -> Array:
    """The sink of each row's head, in base 2."""
    span = call.shape.span
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 0, layout=WGMMA)
    out = jnp.zeros(row.shape, jnp.float32)
    for g in range(call.shape.heads):
        mine = (row >= g * span) & (row < (g + 1) * span)
        out = jnp.where(mine, lax.broadcast_in_dim(call.sinks[head + g], row.shape, []), out)  # type: ignore[index]
    return out.max(axis=1)
