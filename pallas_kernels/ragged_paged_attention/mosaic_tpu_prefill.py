"""Ragged paged attention on TPU, sequences with several queries (prefill chunks, verification of drafts).

XLA brings the queries of each such sequence to rows that start at a multiple of `ALIGNMENT`, so that a tile of queries is an
aligned slice. An item is a tile of one sequence; it visits the pages up to its last query (causal), a stretch of tokens and a few
heads at a time, with the online softmax in float32: while one head waits for its matmul, the core works on the scores of another.
Stretches that every query of the tile sees in full take a path without masks.

Tiles of one sequence overrun into the rows of the next one; those rows are written again by their own tile, later.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.ragged_paged_attention import mosaic_tpu_softmax as softmax
from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import HeadConstants, Numbers, dot
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import LANES, NARROW, AtOnce, Plan
from pallas_kernels.ragged_paged_attention.mosaic_tpu_stream import (
    Buffers,
    KVStream,
    Pool,
    Tables,
    buffers,
    compiler_params,
    stream_of,
)

KERNEL_NAME = "ragged_paged_attention_prefill"
ALIGNMENT = 16


class Tiles(NamedTuple):
    """What an item is beside its pages: the first aligned row of its queries, and the position of the first one."""

    row: Int[Array, " N"]
    query_at: Int[Array, " N"]


def prefill(
    out: Float[Array, "T H D"],
    q: Float[Array, "T H D"],
    constants: HeadConstants,
    cu_q_lens: Int[Array, " S+1"],
    q_lens: Int[Array, " S"],
    kv_lens: Int[Array, " S"],
    page_table: Int[Array, " S*W"],
    layer: Int[Array, " one"],
    pool: Pool,
    *,
    plan: Plan,
    numbers: Numbers,
    sliding_window: int | None,
    soft_cap: float | None,
    interpret: Any,
) -> Float[Array, "T H D"]:
    """`out` with the rows of the sequences that have more than one query. Nothing runs where there is none."""
    T, H, D = q.shape
    K, G = plan.num_kv_heads, plan.queries_per_kv
    tiles = jnp.where(q_lens > 1, -(-q_lens // plan.query_tile), 0)
    tiles_until = jnp.cumsum(tiles, dtype=jnp.int32)
    num_items = tiles_until[-1:]

    def run(out: Array) -> Array:
        aligned = jnp.where(q_lens > 1, -(-q_lens // ALIGNMENT) * ALIGNMENT, 0)
        aligned_start = jnp.cumsum(aligned, dtype=jnp.int32) - aligned
        pages_of, items = _items(tiles, tiles_until, aligned_start, q_lens, kv_lens, T, plan, sliding_window)
        tables = Tables(*pages_of, num_items, kv_lens, page_table, layer)
        row_of_token, mine, aligned_rows = _aligned_rows(aligned_start, cu_q_lens, q_lens, T, plan)
        queries = (q * jnp.asarray(2.0**numbers.gain, q.dtype)).reshape(T, K, G, D)
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, plan.head_lanes - D)))
        q_rows = jnp.zeros((aligned_rows, K, G, plan.head_lanes), q.dtype).at[row_of_token].set(queries, mode="drop")
        factors = jnp.stack([constants.key_factor, constants.value_factor]).reshape(-1)
        starts = jnp.stack([constants.start_top, constants.start_total])
        starts = jnp.broadcast_to(starts[..., None, None], (2, K, G, 1, LANES)).at[1].multiply(jnp.arange(LANES) == 0)
        result = _call(
            q_rows.transpose(1, 2, 0, 3), starts, factors, tables, items, pool,
            plan=plan, numbers=numbers, sliding_window=sliding_window, soft_cap=soft_cap, interpret=interpret,
        )  # fmt: skip
        result = result[..., plan.value_lane :].transpose(2, 0, 1, 3).reshape(aligned_rows, H, D)
        return jnp.where(mine[:, None, None], result[jnp.minimum(row_of_token, aligned_rows - 1)], out)

    result: Array = lax.cond(num_items[0] > 0, run, lambda out: out, out)
    return result


def _items(
    tiles: Int[Array, " S"],
    tiles_until: Int[Array, " S"],
    aligned_start: Int[Array, " S"],
    q_lens: Int[Array, " S"],
    kv_lens: Int[Array, " S"],
    num_tokens: int,
    plan: Plan,
    sliding_window: int | None,
) -> tuple[tuple[Int[Array, " N"], Int[Array, " N"], Int[Array, " N"]], Tiles]:
    """(sequence, first page, end page) of each item, and its queries."""
    S, tile = q_lens.shape[0], plan.query_tile
    at_most = -(-num_tokens // tile) + min(S, num_tokens // 2)
    item = jnp.arange(at_most, dtype=jnp.int32)
    seq = jnp.minimum(jnp.searchsorted(tiles_until, item, side="right"), S - 1).astype(jnp.int32)
    first_row = (item - (tiles_until[seq] - tiles[seq])) * tile
    query_at = kv_lens[seq] - q_lens[seq] + first_row
    last_at = jnp.minimum(query_at + tile, kv_lens[seq]) - 1
    window = query_at + 1 if sliding_window is None else jnp.minimum(sliding_window, query_at + 1)
    first_page = jnp.where(item < tiles_until[-1], (query_at + 1 - window) // plan.page_size, 0)
    return (seq, first_page, last_at // plan.page_size + 1), Tiles(aligned_start[seq] + first_row, query_at)


def _aligned_rows(
    aligned_start: Int[Array, " S"],
    cu_q_lens: Int[Array, " S+1"],
    q_lens: Int[Array, " S"],
    num_tokens: int,
    plan: Plan,
) -> tuple[Int[Array, " T"], Bool[Array, " T"], int]:
    """The aligned row of each token, whether it has one (the row of others is out of range), and how many rows there are."""
    T, S = num_tokens, q_lens.shape[0]
    rows = -(-(T + min(S, T // 2) * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT + plan.query_tile
    token = jnp.arange(T)
    seq = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], token, side="right"), S - 1)
    mine = (q_lens > 1)[seq] & (token >= cu_q_lens[seq]) & (token < cu_q_lens[seq] + q_lens[seq])
    return jnp.where(mine, aligned_start[seq] + token - cu_q_lens[seq], rows), mine, rows


def _call(
    q: Float[Array, "K G R lanes"],
    starts: Float[Array, "two K G one lanes"],
    factors: Float[Array, " two*K"],
    tables: Tables,
    tiles: Tiles,
    pool: Pool,
    *,
    plan: Plan,
    numbers: Numbers,
    sliding_window: int | None,
    soft_cap: float | None,
    interpret: Any,
) -> Float[Array, "K G R lanes"]:
    K, G = q.shape[:2]

    def kernel(
        tables: Tables, tiles: Tiles, factors: Any, starts: Any, q: Any, pool: Pool, out: Any, q_buf: Any, q_sem: Any,
        state: softmax.Softmax, held: Buffers,
    ) -> None:  # fmt: skip
        stream = stream_of(plan, numbers, tables, pool, held)
        item = pl.program_id(0)
        refs = (tiles, factors, starts, q, q_buf, q_sem, state, out)
        step = _Item(plan, numbers, sliding_window, soft_cap, item, stream, *refs)
        pl.when(item < tables.num_items[0])(step.attend)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(tables.seq_of.shape[0],),
            in_specs=[pl.BlockSpec(starts.shape, lambda *_: (0, 0, 0, 0, 0)), in_hbm, pool.specs],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((K, G, plan.query_tile, plan.head_lanes), q.dtype),
                pltpu.SemaphoreType.DMA,
                softmax.scratch(K, G * plan.query_tile, plan.head_lanes),
                buffers(plan, numbers, pool),
            ],
        ),
        compiler_params=compiler_params(plan),
        interpret=interpret,
        name=KERNEL_NAME,
    )
    result: Array = call(tables, tiles, factors, starts, q, pool)
    return result


@dataclasses.dataclass(frozen=True)
class _Item:
    """One grid step: references to scalar memory (tiles, factors), HBM (q, out) and VMEM (starts, q_buf)."""

    plan: Plan
    numbers: Numbers
    sliding_window: int | None
    soft_cap: float | None
    item: Any
    stream: KVStream
    tiles: Tiles
    factors: Any
    starts: Any
    q: Any
    q_buf: Any
    q_sem: Any
    state: softmax.Softmax
    out: Any

    @property
    def rows(self) -> int:
        return self.plan.queries_per_kv * self.plan.query_tile

    def attend(self) -> None:
        item, plan, tables = self.item, self.plan, self.stream.tables
        kv_len = tables.kv_lens[tables.seq_of[item]]
        begin, end = tables.first_page[item], tables.end_page[item]
        first_query = self.tiles.query_at[item]
        q_rows = pl.ds(pl.multiple_of(self.tiles.row[item], ALIGNMENT), plan.query_tile)
        fetch_q = pltpu.make_async_copy(self.q.at[:, :, q_rows], self.q_buf, self.q_sem)
        fetch_q.start()
        self._for_heads(self._begin)
        fetch_q.wait()

        def visit(step: Any, carry: None) -> None:  # noqa: ARG001
            page = begin + step * plan.block_pages
            slot = self.stream.next_block(jnp.minimum(plan.block_pages, end - page))
            start = page * plan.page_size
            self._block(slot, start, jnp.minimum(kv_len, end * plan.page_size) - start, first_query)

        lax.fori_loop(0, pl.cdiv(end - begin, plan.block_pages), visit, None)
        self._for_heads(self._finish)
        store = pltpu.make_async_copy(self.q_buf, self.out.at[:, :, q_rows], self.q_sem)
        store.start()
        store.wait()

    def _for_heads(self, do: Any) -> None:
        lax.fori_loop(0, self.plan.num_kv_heads, lambda head, _: do(head), None)

    def _begin(self, head: Any) -> None:
        shape = (self.plan.queries_per_kv, self.plan.query_tile, LANES)
        self.state.top[head] = jnp.broadcast_to(self.starts[0, head], shape).reshape(self.rows, LANES)
        self.state.total[head] = jnp.broadcast_to(self.starts[1, head], shape).reshape(self.rows, LANES)
        self.state.acc[head] = jnp.zeros((self.rows, self.plan.head_lanes), jnp.float32)

    def _block(self, slot: Any, start: Any, valid: Any, first_query: Any) -> None:
        """Folds the block whose first token is at position `start`, `valid` of whose tokens exist, into all heads."""
        plan, window = self.plan, self.sliding_window
        seen_from = jnp.int32(0) if window is None else first_query + plan.query_tile - window - start
        seen_until = jnp.minimum(first_query + 1 - start, plan.block_tokens)

        def visit(at: Any) -> Any:
            at = pl.multiple_of(at, NARROW)
            seen_by_all = (at >= seen_from) & (at + plan.unmasked.tokens <= seen_until)

            @pl.when(seen_by_all)
            def _() -> None:
                self._stretch(slot, at, plan.unmasked, None)

            @pl.when(jnp.logical_not(seen_by_all))
            def _() -> None:
                self.stream.clean_tail(slot, valid, at + plan.masked.tokens)
                self._stretch(slot, at, plan.masked, start + at)

            return at + jnp.where(seen_by_all, plan.unmasked.tokens, plan.masked.tokens)

        lax.while_loop(lambda at: at < jnp.minimum(valid, plan.block_tokens), visit, jnp.int32(0))

    def _stretch(self, slot: Any, at: Any, at_once: AtOnce, masked_from: Any) -> None:
        """Folds tokens of a block, from `at` on, into all heads. masked_from: the position of the first, None without a mask."""
        if self.stream.scales is not None:
            self.stream.scales.order(slot, at, at_once.tokens)
        tokens = pl.ds(at, at_once.tokens)

        def some(i: Any, carry: None) -> None:  # noqa: ARG001
            self._fold([i * at_once.heads + j for j in range(at_once.heads)], slot, tokens, masked_from)

        lax.fori_loop(0, self.plan.num_kv_heads // at_once.heads, some, None)

    def _fold(self, heads: list[Any], slot: Any, tokens: Any, masked_from: Any) -> None:
        """In stages that each do all of the heads: nothing orders them but what they compute."""
        numbers, scales = self.numbers, self.stream.scales
        scores = [self._scores(head, slot, tokens) for head in heads]
        seen = None if masked_from is None else self._seen(masked_from, tokens.size)
        weighed = []
        for head, score in zip(heads, scores, strict=True):
            own = None
            if scales is not None:
                own = functools.partial(scales.row, slot, head, tokens.start, tokens.size, values=True)
            weighed.append(self.state.weigh(head, score, seen, own, numbers))
        for head, (weights, shrink) in zip(heads, weighed, strict=True):
            values = _operand(self.stream.kv_buf, slot, tokens, self.plan, head, values=True)
            self.state.add(head, weights, shrink, numbers.widen(values), numbers)

    def _scores(self, head: Any, slot: Any, tokens: Any) -> jax.Array:
        plan, scales = self.plan, self.stream.scales
        keys = self.numbers.widen(_operand(self.stream.kv_buf, slot, tokens, plan, head, values=False))
        queries = self.q_buf[head].reshape(self.rows, plan.head_lanes)
        scores = dot(queries, keys, 1, self.numbers.precision) * self.factors[head]
        if scales is not None:
            scores = scores * scales.row(slot, head, tokens.start, tokens.size, values=False)
        return scores if self.soft_cap is None else jnp.tanh(scores) * self.soft_cap

    def _seen(self, start: Any, width: int) -> jax.Array:
        """Which keys, from position `start` on, each row of queries sees."""
        shape = (self.rows, width)
        key_at = start + self.numbers.token_of_column(shape, 1)
        row = lax.broadcasted_iota(jnp.int32, shape, 0)
        at = self.tiles.query_at[self.item] + (row & (self.plan.query_tile - 1))
        seen: jax.Array = key_at <= at
        if self.sliding_window is not None:
            seen = seen & (key_at > at - self.sliding_window)
        return seen

    def _finish(self, head: Any) -> None:
        factor = self.factors[self.plan.num_kv_heads + head]
        result = self.state.result(head, self.state.acc[head], factor, self.numbers)
        self.q_buf[head] = result.astype(self.q_buf.dtype).reshape(self.q_buf.shape[1:])


def _operand(kv_buf: Any, slot: Any, tokens: Any, plan: Plan, head: Any, *, values: bool) -> jax.Array:
    """Keys or values [tokens, head lanes] of one head, as stored. For D = 64 both are the shared register."""
    D = plan.head_dim
    start = head * LANES if D < LANES else head * 2 * D + (D if values else 0)
    result: jax.Array = kv_buf[slot, tokens, pl.ds(pl.multiple_of(start, LANES), plan.head_lanes)]
    return result
