"""Ragged paged attention on TPU, sequences with several queries (prefill chunks, verification of drafts).

XLA brings the queries of each such sequence to rows that start at a multiple of `ALIGNMENT`, so that a tile of queries is an
aligned slice. An item is a tile of one sequence; it visits the pages up to its last query (causal), head by head, with the
online softmax in float32. Blocks that every query of the tile sees in full take a path without masks.

Tiles of one sequence overrun into the rows of the next one; those rows are written again by their own tile, later.
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

from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import MASKED, HeadConstants, Numbers, across, dot
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import LANES, Plan
from pallas_kernels.ragged_paged_attention.mosaic_tpu_scales import scratch_shapes, streamed_scales
from pallas_kernels.ragged_paged_attention.mosaic_tpu_stream import CURSOR_SIZE, KVStream

KERNEL_NAME = "ragged_paged_attention_prefill"
ALIGNMENT = 16


def prefill(
    out: Float[Array, "T H D"],
    q: Float[Array, "T H D"],
    constants: HeadConstants,
    cu_q_lens: Int[Array, " S+1"],
    q_lens: Int[Array, " S"],
    kv_lens: Int[Array, " S"],
    page_table: Int[Array, " S*W"],
    layer: Int[Array, " one"],
    pages: Array,
    token_scales: Array | None,
    *,
    plan: Plan,
    numbers: Numbers,
    sliding_window: int | None,
    soft_cap: float | None,
    interpret: Any,
) -> Float[Array, "T H D"]:
    """`out` with the rows of the sequences that have more than one query. Nothing runs where there is none."""
    T, H, D = q.shape
    K, G, tile = plan.num_kv_heads, plan.queries_per_kv, plan.query_tile
    several = q_lens > 1
    tiles = jnp.where(several, -(-q_lens // tile), 0)
    tiles_until = jnp.cumsum(tiles, dtype=jnp.int32)
    num_items = tiles_until[-1:]

    def run(out: Array) -> Array:
        S = q_lens.shape[0]
        at_most = -(-T // tile) + min(S, T // 2)
        item = jnp.arange(at_most, dtype=jnp.int32)
        seq = jnp.minimum(jnp.searchsorted(tiles_until, item, side="right"), S - 1).astype(jnp.int32)
        first_row = (item - (tiles_until[seq] - tiles[seq])) * tile
        aligned = jnp.where(several, -(-q_lens // ALIGNMENT) * ALIGNMENT, 0)
        aligned_start = jnp.cumsum(aligned, dtype=jnp.int32) - aligned
        query_at = kv_lens[seq] - q_lens[seq] + first_row
        last_at = jnp.minimum(query_at + tile, kv_lens[seq]) - 1
        window = query_at + 1 if sliding_window is None else jnp.minimum(sliding_window, query_at + 1)
        first_page = jnp.where(item < num_items, (query_at + 1 - window) // plan.page_size, 0)
        items = (seq, first_page, last_at // plan.page_size + 1, aligned_start[seq] + first_row, query_at)

        # Aligned rows and back: for each aligned row the token it holds, and for each token its aligned row.
        aligned_rows = -(-(T + min(S, T // 2) * (ALIGNMENT - 1)) // ALIGNMENT) * ALIGNMENT + tile
        token = jnp.arange(T)
        seq_of_token = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], token, side="right"), S - 1)
        mine = (
            several[seq_of_token]
            & (token >= cu_q_lens[seq_of_token])
            & (token < cu_q_lens[seq_of_token] + q_lens[seq_of_token])
        )
        row_of_token = jnp.where(mine, aligned_start[seq_of_token] + token - cu_q_lens[seq_of_token], aligned_rows)
        queries = (q * jnp.asarray(2.0**numbers.gain, q.dtype)).reshape(T, K, G, D)
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, 0), (0, plan.head_lanes - D)))
        q_rows = jnp.zeros((aligned_rows, K, G, plan.head_lanes), q.dtype).at[row_of_token].set(queries, mode="drop")
        factors = jnp.stack([constants.key_factor, constants.value_factor]).reshape(-1)
        starts = jnp.stack([constants.start_top, constants.start_total])
        starts = jnp.broadcast_to(starts[..., None, None], (2, K, G, 1, LANES)).at[1].multiply(jnp.arange(LANES) == 0)
        result = _call(
            q_rows.transpose(1, 2, 0, 3), starts, factors, items, num_items, kv_lens, page_table, layer, pages, token_scales,
            plan=plan, numbers=numbers, sliding_window=sliding_window, soft_cap=soft_cap, interpret=interpret,
        )  # fmt: skip
        result = result[..., plan.value_lane :].transpose(2, 0, 1, 3).reshape(aligned_rows, H, D)
        return jnp.where(mine[:, None, None], result[jnp.minimum(row_of_token, aligned_rows - 1)], out)

    result: Array = lax.cond(num_items[0] > 0, run, lambda out: out, out)
    return result


def _call(
    q: Float[Array, "K G R lanes"],
    starts: Float[Array, "two K G one lanes"],
    factors: Float[Array, " two*K"],
    items: tuple[Int[Array, " N"], ...],
    num_items: Int[Array, " one"],
    kv_lens: Int[Array, " S"],
    page_table: Int[Array, " S*W"],
    layer: Int[Array, " one"],
    pages: Array,
    token_scales: Array | None,
    *,
    plan: Plan,
    numbers: Numbers,
    sliding_window: int | None,
    soft_cap: float | None,
    interpret: Any,
) -> Float[Array, "K G R lanes"]:
    K, G = q.shape[:2]
    rows = G * plan.query_tile
    kernel = functools.partial(
        _kernel,
        plan=plan,
        pages_per_seq=page_table.shape[0] // kv_lens.shape[0],
        numbers=numbers,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_token_scales=token_scales is not None,
    )
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    scale_inputs = [] if token_scales is None else [token_scales]
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=10,
            grid=(items[0].shape[0],),
            in_specs=[
                pl.BlockSpec(starts.shape, lambda *_: (0, 0, 0, 0, 0)),
                in_hbm,
                in_hbm,
                *[in_hbm for _ in scale_inputs],
            ],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((plan.slots, plan.block_tokens, plan.page_lanes), pages.dtype),
                pltpu.VMEM((K, G, plan.query_tile, plan.head_lanes), q.dtype),
                pltpu.VMEM((K, rows, LANES), jnp.float32),
                pltpu.VMEM((K, rows, LANES), jnp.float32),
                pltpu.VMEM((K, rows, plan.head_lanes), jnp.float32),
                pltpu.SemaphoreType.DMA((plan.slots,)),
                pltpu.SemaphoreType.DMA,
                pltpu.SMEM((CURSOR_SIZE,), jnp.int32),
                *([] if token_scales is None else scratch_shapes(plan, numbers)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=plan.vmem_limit, disable_bounds_checks=True
        ),
        interpret=interpret,
        name=KERNEL_NAME,
    )
    result: Array = call(*items, num_items, kv_lens, page_table, layer, factors, starts, q, pages, *scale_inputs)
    return result


def _kernel(
    seq_of: Any,
    first_page: Any,
    end_page: Any,
    row_of: Any,
    query_at: Any,
    num_items: Any,
    kv_lens: Any,
    page_table: Any,
    layer: Any,
    factors: Any,
    starts: Any,
    q_hbm: Any,
    pages: Any,
    *rest: Any,
    plan: Plan,
    pages_per_seq: int,
    numbers: Numbers,
    sliding_window: int | None,
    soft_cap: float | None,
    has_token_scales: bool,
) -> None:
    scales_hbm, rest = (rest[0], rest[1:]) if has_token_scales else (None, rest)
    out_hbm, kv_buf, q_buf, top_ref, total_ref, acc_ref, sems, q_sem, cursor, *scale_bufs = rest
    scales = streamed_scales(plan, numbers, scales_hbm, *scale_bufs) if has_token_scales else None
    stream = KVStream(
        plan, pages_per_seq, layer, num_items, seq_of, first_page, end_page, page_table, pages, kv_buf, scales,
        sems, cursor,
    )  # fmt: skip
    item = pl.program_id(0)
    K, rows, block_tokens = plan.num_kv_heads, plan.queries_per_kv * plan.query_tile, plan.block_tokens

    @pl.when(item == 0)
    def _() -> None:
        stream.start()

    def fold_block(slot: Any, start: Any, masked: bool) -> None:
        """Folds one block, whose first token is at position `start`, into the running softmax of all heads."""

        if scales is not None:
            scales.order(slot, 0, block_tokens)

        def fold_head(head: Any, _: None) -> None:
            keys = numbers.widen(_operand(kv_buf, slot, plan, head, values=False))
            queries = q_buf[head].reshape(rows, plan.head_lanes)
            score = dot(queries, keys, 1, numbers.precision) * factors[head]
            if scales is not None:
                score = score * scales.row(slot, head, 0, block_tokens, values=False)
            if soft_cap is not None:
                score = jnp.tanh(score) * soft_cap
            seen = None
            if masked:
                key_at = start + numbers.token_of_column((rows, block_tokens), 1)
                row = lax.broadcasted_iota(jnp.int32, (rows, block_tokens), 0)
                at = query_at[item] + (row & (plan.query_tile - 1))
                seen = key_at <= at
                if sliding_window is not None:
                    seen = seen & (key_at > at - sliding_window)
                score = jnp.where(seen, score, MASKED)
            top = top_ref[head]
            new_top = jnp.maximum(top, jnp.max(score, axis=1, keepdims=True))
            weights = jnp.exp2(score - across(new_top - float(numbers.gain), block_tokens))
            if seen is not None:
                weights = jnp.where(seen, weights, 0.0)
            shrink = jnp.exp2(top - new_top)
            chunks = [weights[:, i : i + LANES] for i in range(0, block_tokens, LANES)]
            top_ref[head] = new_top
            total_ref[head] = total_ref[head] * shrink + functools.reduce(jnp.add, chunks)
            if scales is not None:
                weights = weights * scales.row(slot, head, 0, block_tokens, values=True)
                if seen is not None:
                    weights = jnp.where(seen, weights, 0.0)
            values = numbers.widen(_operand(kv_buf, slot, plan, head, values=True))
            acc_ref[head] = acc_ref[head] * across(shrink, plan.head_lanes) + dot(weights, values, 0, numbers.precision)

        lax.fori_loop(0, K, fold_head, None)

    @pl.when(item < num_items[0])
    def _() -> None:
        kv_len = kv_lens[seq_of[item]]
        begin, end = first_page[item], end_page[item]
        first_query = query_at[item]
        q_rows = pl.ds(pl.multiple_of(row_of[item], ALIGNMENT), plan.query_tile)
        fetch_q = pltpu.make_async_copy(q_hbm.at[:, :, q_rows], q_buf, q_sem)
        fetch_q.start()

        def begin_head(head: Any, _: None) -> None:
            shape = (plan.queries_per_kv, plan.query_tile, LANES)
            top_ref[head] = jnp.broadcast_to(starts[0, head], shape).reshape(rows, LANES)
            total_ref[head] = jnp.broadcast_to(starts[1, head], shape).reshape(rows, LANES)
            acc_ref[head] = jnp.zeros((rows, plan.head_lanes), jnp.float32)

        lax.fori_loop(0, K, begin_head, None)
        fetch_q.wait()

        def visit(step: Any, carry: None) -> None:  # noqa: ARG001
            page = begin + step * plan.block_pages
            slot = stream.next_block(jnp.minimum(plan.block_pages, end - page))
            start = page * plan.page_size
            valid = jnp.minimum(kv_len, end * plan.page_size) - start
            whole = start + block_tokens <= first_query + 1
            if sliding_window is not None:
                whole = whole & (start > first_query + plan.query_tile - 1 - sliding_window)

            @pl.when(whole)
            def _() -> None:
                fold_block(slot, start, masked=False)

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                stream.clean_tail(slot, valid, block_tokens)
                fold_block(slot, start, masked=True)

        lax.fori_loop(0, pl.cdiv(end - begin, plan.block_pages), visit, None)

        def finish(head: Any, _: None) -> None:
            total = jnp.sum(total_ref[head], axis=1, keepdims=True) * 2.0**-numbers.gain
            result = acc_ref[head] * factors[K + head] / jnp.where(total == 0.0, 1.0, total)
            q_buf[head] = result.astype(q_buf.dtype).reshape(q_buf.shape[1:])

        lax.fori_loop(0, K, finish, None)
        store = pltpu.make_async_copy(q_buf, out_hbm.at[:, :, q_rows], q_sem)
        store.start()
        store.wait()


def _operand(kv_buf: Any, slot: Any, plan: Plan, head: Any, *, values: bool) -> jax.Array:
    """Keys or values [block, head lanes] of one head, as stored. For D = 64 both are the shared register."""
    D = plan.head_dim
    start = head * LANES if D < LANES else head * 2 * D + (D if values else 0)
    result: jax.Array = kv_buf[slot, :, pl.ds(pl.multiple_of(start, LANES), plan.head_lanes)]
    return result
