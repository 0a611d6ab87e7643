"""The consuming warpgroups of the Hopper flash attention kernel: matmuls and softmax of 64 rows each (`hopper.schedule`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.mosaic_gpu_call import Call, RowTile
from pallas_kernels.hopper.memory import Ref
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.hopper.schedule import State, first_tile, last_values, next_tile
from pallas_kernels.hopper.softmax import NO_LOGIT, fold, logits
from pallas_kernels.hopper.warpgroups import ROW, ROWS, WGMMA


def consume(call: Call, wg: Array) -> None:
    """Attention of one warpgroup's 64 rows."""
    tile = call.tile()
    row = tile.row + wg * ROWS
    low, count = call.kernel.key_tiles(row, ROWS, tile.q_len, tile.kv_len)
    low = jnp.where(count > 0, low, tile.high)
    rows = Rows(call, wg, tile, row, low, low + count)
    pl.loop(tile.low, low)(rows.skip)
    pl.when(count > 0)(lambda: _attend(rows))
    pl.loop(rows.high, tile.high)(rows.skip)

    @pl.when(count == 0)
    def _nothing() -> None:
        # Its queries come all the same, if the other warpgroup's do: not over what is written there.
        pl.when(tile.high > tile.low)(lambda: plgpu.barrier_wait(call.scratch["queries"].at[wg]))
        _write(rows, plgpu.layout_cast(jnp.zeros((ROWS, call.kernel.head_dim), jnp.float32), WGMMA))


@dataclass(frozen=True)
class Rows:
    """One warpgroup's rows, from `row` on. They attend to the key tiles [low, high)."""

    call: Call
    wg: Array
    tile: RowTile
    row: Array
    low: Array
    high: Array

    @property
    def dtype(self) -> Any:
        return self.call.scratch["v"].dtype

    @property
    def keys(self) -> int:
        return self.call.kernel.tiles.keys

    @property
    def parts(self) -> list[int]:
        return [self.call.kernel.head_dim]

    @property
    def sums(self) -> Ref:
        return self.call.scratch["sums"].at[self.wg]

    @property
    def queries(self) -> Ref:
        return self.call.scratch["rows"].at[self.wg]

    @property
    def rings(self) -> tuple[Ring, Ring]:
        return self.call.rings

    def number(self, j: Any) -> Array:
        return j - self.tile.low

    def skip(self, j: Array) -> None:
        """Passes a tile that none of these rows sees."""
        for ring in self.rings:
            ring.wait(self.number(j))
            ring.release(self.number(j))

    def start_keys(self, out: Ref, j: Array) -> None:
        plgpu.wgmma(out, self.queries, self.rings[0].wait(self.number(j)).transpose((1, 0)))

    def softmax(
        self, dots: Array, j: Array, top: Array, total: Array, *, masked: bool
    ) -> tuple[Array, Array, Array, Array]:
        scoring = self.call.kernel.scoring
        scores, factor = logits(dots, scoring.scale, scoring.logit_soft_cap)
        if masked:
            scores = jnp.where(self.seen(scores.shape, j), scores, -jnp.inf)
        return fold(scores, factor, top, total)

    def seen(self, shape: tuple[int, ...], j: Array) -> Array:
        """Whether each row sees each key of tile j."""
        kernel, tile = self.call.kernel, self.tile
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        if not kernel.scoring.causal:
            return column < tile.kv_len - j * self.keys
        own = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
        behind = kernel.token(self.row + own) + (tile.kv_len - tile.q_len - j * self.keys) - column
        if kernel.scoring.sliding_window is None:
            return behind >= 0
        return (behind >= 0) & (behind < kernel.scoring.sliding_window)


def _attend(rows: Rows) -> None:
    """Attention over the key tiles, of which there is one at least."""
    plgpu.barrier_wait(rows.call.scratch["queries"].at[rows.wg])
    top = plgpu.layout_cast(jnp.full((ROWS,), NO_LOGIT, jnp.float32), ROW)
    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
    acc, top, total, weights = _visible_tiles(rows, first_tile(rows, rows.low, top, total))
    value_ring, last = rows.rings[1], rows.number(rows.high - 1)
    (out,) = last_values(rows, acc, weights, value_ring.wait(last))
    value_ring.release(last)
    _finish(rows, out, top, total)


def _visible_tiles(rows: Rows, state: State) -> State:
    """The state after all further tiles, those in the middle without a mask."""
    N, kernel, tile, low, high = jnp.int32(rows.keys), rows.call.kernel, rows.tile, rows.low, rows.high

    def loop(begin: Array, end: Array, state: State, masked: bool) -> State:
        return lax.fori_loop(begin, end, lambda j, s: next_tile(rows, j, s, masked=masked), state)

    # Keys [all_low, all_high) are seen by every query of the warpgroup.
    first, last = kernel.token(rows.row), kernel.token(rows.row + ROWS - 1)
    all_low, all_high = kernel.scoring.seen_by_all(first, last, tile.q_len, tile.kv_len)
    begin = low + 1
    if kernel.scoring.sliding_window is not None:
        begin = jnp.clip(lax.div(all_low + N - 1, N), low + 1, high)
        state = loop(low + 1, begin, state, masked=True)
    end = jnp.clip(lax.div(jnp.maximum(all_high, 0), N), begin, high)
    state = loop(begin, end, state, masked=False)
    return loop(end, high, state, masked=True)


def _finish(rows: Rows, acc: Array, top: Array, total: Array) -> None:
    """Divides by the weights' sum, in which a sink is one more key whose value is zero, and writes the result."""
    if rows.call.sinks is not None:
        sink = _sinks_of_rows(rows, rows.call.sinks)
        new_top = jnp.maximum(top, sink)
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.exp2(sink - new_top)
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
    inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
    _write(rows, acc * lax.broadcast_in_dim(inverse, acc.shape, [0]))


def _sinks_of_rows(rows: Rows, sinks: Ref) -> Array:
    """The sink of each row's head, in base 2."""
    pack, head = rows.call.kernel.pack, rows.tile.head
    own = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 0, layout=WGMMA)
    if pack == 1:
        return lax.broadcast_in_dim(sinks[head], own.shape, []).max(axis=1)
    packed = lax.rem(rows.row + own, jnp.int32(pack))
    out = jnp.zeros(own.shape, jnp.float32)
    for i in range(pack):
        out = jnp.where(packed == i, lax.broadcast_in_dim(sinks[head * pack + i], own.shape, []), out)
    return out.max(axis=1)


def _write(rows: Rows, out: Array) -> None:
    """Writes a warpgroup's rows by way of the shared memory of its queries; rows beyond the sequence's end as zeros."""
    tile, staged = rows.tile, rows.queries
    own = plgpu.broadcasted_iota(jnp.int32, out.shape, 0, layout=WGMMA)
    out = jnp.where(rows.call.kernel.token(rows.row + own) < tile.q_len, out, 0.0).astype(staged.dtype)
    staged[...] = out
    plgpu.commit_smem()
    at = pl.ds(pl.multiple_of(rows.row, ROWS), ROWS)
    plgpu.copy_smem_to_gmem(staged, rows.call.out.at[tile.batch, at, tile.head])
    plgpu.wait_smem_to_gmem(0)
