"""The consuming warpgroups of the Hopper prefill kernel: matmuls and online softmax of 64 query rows each (`hopper.schedule`).

Tiles that no query of a warpgroup sees are never multiplied, tiles that all see fully are not masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.memory import Ref
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.hopper.schedule import State, first_tile, last_values, next_tile
from pallas_kernels.hopper.softmax import NO_LOGIT, fold
from pallas_kernels.hopper.warpgroups import CONSUMERS, ROW, ROWS, WGMMA
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import first_visible_key, scaled_dots
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_call import Call, Item
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_output import write


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
    """One warpgroup's rows of an item. They attend to the key tiles [low, high).

    before_first: the number, in the rings, that the item's tile 0 would have. position: of the first row's token. first, last: positions
    of the first and last token that is its own. tokens: how many are.
    """

    call: Call
    index: Array
    before: Array
    wg: Array
    item: Item
    before_first: Array
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
    def dtype(self) -> Any:
        return self.call.spec.compute_dtype

    @property
    def keys(self) -> int:
        return self.call.tuning.keys

    @property
    def parts(self) -> list[int]:
        """Two at head_dim 256: one `wgmma` has 256 columns at most, and its registers are easier to place in halves."""
        part = min(self.call.spec.head_dim, 128)
        return [part] * (self.call.spec.head_dim // part)

    @property
    def sums(self) -> Ref:
        return self.call.scratch["sums"].at[self.wg]

    @property
    def rings(self) -> tuple[Ring, Ring]:
        return self.call.converted() if self.call.spec.quantized else self.call.stored()

    def number(self, j: Any) -> Array:
        return self.before_first + j

    def skip(self, j: Array, carry: None) -> None:
        """Passes a tile that none of these rows sees."""
        del carry
        for ring in self.rings:
            ring.wait(self.number(j))
            ring.release(self.number(j))

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
        call = self.call
        # The index is wg, but not to the compiler, which would keep all descriptors of the queries in registers.
        at = self.wg + jnp.where(self.number(j) >= 0, 0, 1) if call.spec.head_dim == 256 else self.wg
        keys = self.rings[0].wait(self.number(j))
        plgpu.wgmma(out, call.scratch["q_smem"].at[at], keys.transpose((1, 0)))

    def softmax(
        self, dots: Array, j: Array, top: Array, total: Array, *, masked: bool
    ) -> tuple[Array, Array, Array, Array]:
        scores, factor = scaled_dots(self.call.spec, dots, self.static_scale(0))
        if masked:
            scores = jnp.where(self._seen(scores.shape, j), scores, -jnp.inf)
        return fold(scores, factor, top, total)

    def _seen(self, shape: tuple[int, ...], j: Array) -> Array:
        """Whether each row sees each key of tile j."""
        token = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) & (self.call.shape.span - 1)
        # Read, not made by an iota: that would be hoisted out of the loops and fill registers there.
        column = plgpu.load(self.call.columns, layout=WGMMA.reduce(0), optimized=False)
        behind = (self.position - j * self.keys) + token - lax.broadcast_in_dim(column, shape, [1])
        seen = behind >= 0
        if self.call.spec.sliding_window is not None:
            seen &= behind < self.call.spec.sliding_window
        return seen

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
    """The output of the rows, in parts of columns."""
    call = rows.call
    value_ring = rows.rings[1]
    acc, _, total, weights = _visible_tiles(rows, first_tile(rows, rows.low, *_before_keys(rows)))
    rows = rows.again()
    rows.release_queries()
    values = value_ring.wait(rows.number(rows.high - 1))
    if not call.spec.quantized:
        _clean_tail(rows, values)
    acc = last_values(rows, acc, weights, values)
    value_ring.release(rows.number(rows.high - 1))
    value_scale = rows.static_scale(1)
    inverse = 1.0 / total if value_scale is None else value_scale / total
    return [(x * lax.broadcast_in_dim(inverse, x.shape, [0])).astype(rows.dtype) for x in acc]


def _before_keys(rows: _Rows) -> tuple[Array, Array]:
    """Maximum and sum before the first key. A sink is a key whose value is zero."""
    if rows.call.sinks is None:
        top = plgpu.layout_cast(jnp.full((ROWS,), NO_LOGIT, jnp.float32), ROW)
        return top, plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
    top = _sinks(rows.call, rows.item.head)
    return top, plgpu.layout_cast(jnp.ones((ROWS,), jnp.float32), ROW)


def _visible_tiles(rows: _Rows, state: State) -> State:
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
        state = lax.fori_loop(now.low + 1, unmasked(now)[0], lambda j, s: next_tile(now, j, s, masked=True), state)
        rows = rows.again()
    middle = rows
    state = lax.fori_loop(*unmasked(middle), lambda j, s: next_tile(middle, j, s, masked=False), state)
    rows = rows.again()
    return lax.fori_loop(unmasked(rows)[1], rows.high, lambda j, s: next_tile(rows, j, s, masked=True), state)


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
