"""Ragged paged attention on TPU, sequences with one query: a kernel whose cost is the bytes of K and V.

The keys and the values of a block are the stationary operands of the matrix unit, each pushed exactly once; the few queries
of a head stream through. Queries of several KV heads share the 8 rows of a register: their lanes are block-diagonal, so that
one matmul of depth `heads_per_group * D` yields the scores of all of them, and one matmul with the values of those heads
yields all of their outputs (of which the blocks on the diagonal are kept, once, at the end). Row sums stay spread over lanes
until the end; the only cross-lane operation of a block is one maximum per group.
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

from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import MASKED, Numbers, across, dot, numbers_of
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import LANES, Plan
from pallas_kernels.ragged_paged_attention.mosaic_tpu_scales import scratch_shapes, streamed_scales
from pallas_kernels.ragged_paged_attention.mosaic_tpu_stream import CURSOR_SIZE, KVStream

KERNEL_NAME = "ragged_paged_attention_decode"
STRETCH = 256
"""Tokens that the masked path takes at once; FP8 needs whole registers of even and of odd tokens."""
KEY_FACTOR, VALUE_FACTOR, START_TOP, START_TOTAL = range(4)


def decode(
    q: Float[Array, "N groups rows lanes"],
    row_constants: Float[Array, "four groups rows lanes"],
    items: tuple[Int[Array, " N"], ...],
    num_items: Int[Array, " one"],
    kv_lens: Int[Array, " S"],
    page_table: Int[Array, " S*W"],
    layer: Int[Array, " one"],
    pages: Array,
    token_scales: Array | None,
    *,
    plan: Plan,
    sliding_window: int | None,
    soft_cap: float | None,
    interpret: Any,
) -> Float[Array, "N groups rows head_lanes"]:
    """Attention of one query per item. Outputs of items from `num_items` on are undefined.

    q: block-diagonal queries times 2^gain. row_constants: see `KEY_FACTOR` etc.; factors in units of log2, one per row.
    items: (sequence, first page, end page) of each item. token_scales: None unless scales are per token and head.
    """
    N, groups, rows, lanes = q.shape
    numbers = numbers_of(pages.dtype)
    kernel = functools.partial(
        _kernel,
        plan=plan,
        pages_per_seq=page_table.shape[0] // kv_lens.shape[0],
        numbers=numbers,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        has_token_scales=token_scales is not None,
    )

    def item_block(i: Any, *prefetched: Any) -> tuple[Any, int, int, int]:
        return (jnp.minimum(i, jnp.maximum(prefetched[3][0] - 1, 0)), 0, 0, 0)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    scale_inputs = [] if token_scales is None else [token_scales]
    scratch = [
        pltpu.VMEM((plan.slots, plan.block_tokens, plan.page_lanes), pages.dtype),
        pltpu.VMEM((groups, rows, LANES), jnp.float32),
        pltpu.VMEM((groups, rows, LANES), jnp.float32),
        pltpu.VMEM((groups, rows, lanes), jnp.float32),
        pltpu.SemaphoreType.DMA((plan.slots,)),
        pltpu.SMEM((CURSOR_SIZE,), jnp.int32),
        *([] if token_scales is None else scratch_shapes(plan, numbers)),
    ]
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((N, groups, rows, plan.head_lanes), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(N,),
            in_specs=[
                pl.BlockSpec((1, groups, rows, lanes), item_block),
                pl.BlockSpec(row_constants.shape, lambda *_: (0, 0, 0, 0)),
                in_hbm,
                *[in_hbm for _ in scale_inputs],
            ],
            out_specs=pl.BlockSpec((1, groups, rows, plan.head_lanes), item_block),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=plan.vmem_limit, disable_bounds_checks=True
        ),
        interpret=interpret,
        name=KERNEL_NAME,
    )
    result: Array = call(*items, num_items, kv_lens, page_table, layer, q, row_constants, pages, *scale_inputs)
    return result


def _kernel(
    seq_of: Any,
    first_page: Any,
    end_page: Any,
    num_items: Any,
    kv_lens: Any,
    page_table: Any,
    layer: Any,
    q_ref: Any,
    constants: Any,
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
    out_ref, kv_buf, top_ref, total_ref, acc_ref, sems, cursor, *scale_bufs = rest
    scales = streamed_scales(plan, numbers, scales_hbm, *scale_bufs) if has_token_scales else None
    stream = KVStream(
        plan, pages_per_seq, layer, num_items, seq_of, first_page, end_page, page_table, pages, kv_buf, scales,
        sems, cursor,
    )  # fmt: skip
    item = pl.program_id(0)
    block_tokens = plan.block_tokens

    @pl.when(item == 0)
    def _() -> None:
        stream.start()

    def fold(slot: Any, at: Any, width: int, valid: Any, window_start: Any, masked: bool) -> None:
        """Folds tokens [at, at + width) of a block into the running softmax.

        Of the block, tokens [window_start, valid) are seen; all of the stretch are, unless it is masked.
        """
        if scales is not None:
            scales.order(slot, at, width)
        scores = []
        for g in range(plan.groups):
            keys = numbers.widen(_lanes_of(kv_buf, slot, pl.ds(at, width), plan, g, values=False))
            dots = dot(q_ref[0, g].astype(jnp.float32), keys, 1, numbers.precision)
            dots = dots * across(constants[KEY_FACTOR, g], width)
            if scales is not None:
                dots = dots * scales.rows(slot, g, at, width, values=False)
            if soft_cap is not None:
                dots = jnp.tanh(dots) * soft_cap
            scores.append(dots)
        seen = None
        if masked:
            token = at + numbers.token_of_column((plan.rows, width), 1)
            seen = (token < valid) & (token >= window_start)
        for g in range(plan.groups):
            score = scores[g] if seen is None else jnp.where(seen, scores[g], MASKED)
            top = top_ref[g]
            new_top = jnp.maximum(top, jnp.max(score, axis=1, keepdims=True))
            weights = jnp.exp2(score - across(new_top - float(numbers.gain), width))
            if seen is not None:
                weights = jnp.where(seen, weights, 0.0)
            shrink = jnp.exp2(top - new_top)
            chunks = [weights[:, i : i + LANES] for i in range(0, width, LANES)]
            top_ref[g] = new_top
            total_ref[g] = total_ref[g] * shrink + functools.reduce(jnp.add, chunks)
            if scales is not None:
                weights *= scales.rows(slot, g, at, width, values=True)
                if seen is not None:
                    weights = jnp.where(seen, weights, 0.0)
            values = numbers.widen(_lanes_of(kv_buf, slot, pl.ds(at, width), plan, g, values=True))
            acc_ref[g] = acc_ref[g] * across(shrink, plan.group_lanes) + dot(weights, values, 0, numbers.precision)

    @pl.when(item < num_items[0])
    def _() -> None:
        kv_len = kv_lens[seq_of[item]]
        begin, end = first_page[item], end_page[item]
        top_ref[...] = constants[START_TOP]
        total_ref[...] = constants[START_TOTAL]
        acc_ref[...] = jnp.zeros_like(acc_ref)

        def visit(step: Any, carry: None) -> None:  # noqa: ARG001
            page = begin + step * plan.block_pages
            slot = stream.next_block(jnp.minimum(plan.block_pages, end - page))
            start = page * plan.page_size
            valid = kv_len - start
            window_start = jnp.int32(0) if sliding_window is None else kv_len - sliding_window - start
            whole = (valid >= block_tokens) & (window_start <= 0)

            @pl.when(whole)
            def _() -> None:
                fold(slot, 0, block_tokens, valid, window_start, masked=False)

            @pl.when(jnp.logical_not(whole))
            def _() -> None:
                # The ragged ends of a context go in short stretches, so that a short context costs little.
                stop = pl.cdiv(jnp.minimum(valid, block_tokens), STRETCH)
                stream.clean_tail(slot, valid, stop * STRETCH)

                def visit_stretch(j: Any, carry: None) -> None:  # noqa: ARG001
                    at = pl.multiple_of(j * STRETCH, STRETCH)
                    fold(slot, at, STRETCH, valid, window_start, masked=True)

                lax.fori_loop(jnp.maximum(window_start, 0) // STRETCH, stop, visit_stretch, None)

        lax.fori_loop(0, pl.cdiv(end - begin, plan.block_pages), visit, None)

        head_of_row = lax.broadcasted_iota(jnp.int32, (plan.rows, plan.head_lanes), 0) // plan.queries_per_kv
        for g in range(plan.groups):
            total = jnp.sum(total_ref[g], axis=1, keepdims=True) * 2.0**-numbers.gain
            out = acc_ref[g, :, : plan.head_lanes]
            for j in range(1, plan.heads_per_group):
                lanes = slice(j * plan.head_lanes, (j + 1) * plan.head_lanes)
                out = jnp.where(head_of_row == j, acc_ref[g, :, lanes], out)
            factor = across(constants[VALUE_FACTOR, g], plan.head_lanes)
            out_ref[0, g] = (out * factor / jnp.where(total == 0.0, 1.0, total)).astype(out_ref.dtype)


def _lanes_of(kv_buf: Any, slot: Any, tokens: Any, plan: Plan, group: int, *, values: bool) -> jax.Array:
    """Keys or values [tokens, group lanes] of a group's heads, as stored. For D = 64 both are the shared register."""
    first = group * plan.heads_per_group
    if plan.head_dim < LANES:
        shared: jax.Array = kv_buf[slot, tokens, first * LANES : (first + plan.heads_per_group) * LANES]
        return shared
    D = plan.head_dim
    starts = [2 * head * D + (D if values else 0) for head in range(first, first + plan.heads_per_group)]
    return jnp.concatenate([kv_buf[slot, tokens, start : start + D] for start in starts], axis=1)
