"""Ragged paged attention on TPU, sequences with one query: a kernel whose cost is the bytes of K and V.

The keys and the values of a block are the stationary operands of the matrix unit, each pushed exactly once; the few queries
of a head stream through. Queries of several KV heads share the 8 rows of a register: their lanes are block-diagonal, so that
one matmul of depth `heads_per_group * D` yields the scores of all of them, and one matmul with the values of those heads
yields all of their outputs (of which the blocks on the diagonal are kept, once, at the end). Row sums stay spread over lanes
until the end; the only cross-lane operation of a block is one maximum per group.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.ragged_paged_attention import mosaic_tpu_softmax as softmax
from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import Numbers, across, dot, numbers_of
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import LANES, NARROW, Plan
from pallas_kernels.ragged_paged_attention.mosaic_tpu_stream import (
    Buffers,
    KVStream,
    Pool,
    Tables,
    buffers,
    compiler_params,
    stream_of,
)

KERNEL_NAME = "ragged_paged_attention_decode"
KEY_FACTOR, VALUE_FACTOR, START_TOP, START_TOTAL = range(4)


def decode(
    q: Float[Array, "N groups rows lanes"],
    row_constants: Float[Array, "four groups rows lanes"],
    tables: Tables,
    pool: Pool,
    *,
    plan: Plan,
    sliding_window: int | None,
    soft_cap: float | None,
    interpret: Any,
) -> Float[Array, "N groups rows head_lanes"]:
    """Attention of one query per item. Outputs of items from `num_items` on are undefined.

    q: block-diagonal queries times 2^gain. row_constants: see `KEY_FACTOR` etc.; factors in units of log2, one per row.
    """
    N, groups, rows, lanes = q.shape
    numbers = numbers_of(pool.pages.dtype)

    def kernel(
        tables: Tables, q: Any, constants: Any, pool: Pool, out: Any, state: softmax.Softmax, held: Buffers
    ) -> None:
        stream = stream_of(plan, numbers, tables, pool, held)
        item = pl.program_id(0)
        step = _Item(plan, numbers, sliding_window, soft_cap, item, stream, q, constants, state, out)
        pl.when(item < tables.num_items[0])(step.attend)

    def item_block(i: Any, tables: Tables) -> tuple[Any, int, int, int]:
        return (jnp.minimum(i, jnp.maximum(tables.num_items[0] - 1, 0)), 0, 0, 0)

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((N, groups, rows, plan.head_lanes), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(N,),
            in_specs=[
                pl.BlockSpec((1, groups, rows, lanes), item_block),
                pl.BlockSpec(row_constants.shape, lambda *_: (0, 0, 0, 0)),
                pool.specs,
            ],
            out_specs=pl.BlockSpec((1, groups, rows, plan.head_lanes), item_block),
            scratch_shapes=[softmax.scratch(groups, rows, lanes), buffers(plan, numbers, pool)],
        ),
        compiler_params=compiler_params(plan),
        interpret=interpret,
        name=KERNEL_NAME,
    )
    result: Array = call(tables, q, row_constants, pool)
    return result


@dataclasses.dataclass(frozen=True)
class _Item:
    """One grid step. q, constants, out: references to VMEM."""

    plan: Plan
    numbers: Numbers
    sliding_window: int | None
    soft_cap: float | None
    item: Any
    stream: KVStream
    q: Any
    constants: Any
    state: softmax.Softmax
    out: Any

    def attend(self) -> None:
        item, plan, tables = self.item, self.plan, self.stream.tables
        kv_len = tables.kv_lens[tables.seq_of[item]]
        begin, end = tables.first_page[item], tables.end_page[item]
        self.state.top[...] = self.constants[START_TOP]
        self.state.total[...] = self.constants[START_TOTAL]
        self.state.acc[...] = jnp.zeros_like(self.state.acc)

        def visit(step: Any, carry: None) -> None:  # noqa: ARG001
            page = begin + step * plan.block_pages
            slot = self.stream.next_block(jnp.minimum(plan.block_pages, end - page))
            self._block(slot, kv_len, page * plan.page_size)

        lax.fori_loop(0, pl.cdiv(end - begin, plan.block_pages), visit, None)
        self._finish()

    def _block(self, slot: Any, kv_len: Any, start: Any) -> None:
        """Folds the block whose first token is at position `start`."""
        block_tokens, window = self.plan.block_tokens, self.sliding_window
        valid = kv_len - start
        window_start = jnp.int32(0) if window is None else kv_len - window - start
        whole = (valid >= block_tokens) & (window_start <= 0)

        @pl.when(whole)
        def _() -> None:
            self._fold(slot, 0, block_tokens, valid, window_start, masked=False)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            # The ragged ends of a context go in short stretches, so that a short context costs little.
            stop = pl.cdiv(jnp.minimum(valid, block_tokens), NARROW)
            self.stream.clean_tail(slot, valid, stop * NARROW)

            def visit_stretch(j: Any, carry: None) -> None:  # noqa: ARG001
                at = pl.multiple_of(j * NARROW, NARROW)
                self._fold(slot, at, NARROW, valid, window_start, masked=True)

            lax.fori_loop(jnp.maximum(window_start, 0) // NARROW, stop, visit_stretch, None)

    def _fold(self, slot: Any, at: Any, width: int, valid: Any, window_start: Any, masked: bool) -> None:
        """Folds tokens [at, at + width) of a block into the running softmax.

        Of the block, tokens [window_start, valid) are seen; all of the stretch are, unless it is masked.
        """
        plan, numbers, scales = self.plan, self.numbers, self.stream.scales
        if scales is not None:
            scales.order(slot, at, width)
        scores = [self._scores(g, slot, at, width) for g in range(plan.groups)]
        seen = None
        if masked:
            token = at + numbers.token_of_column((plan.rows, width), 1)
            seen = (token < valid) & (token >= window_start)
        for g, score in enumerate(scores):
            own = None if scales is None else functools.partial(scales.rows, slot, g, at, width, values=True)
            weights, shrink = self.state.weigh(g, score, seen, own, numbers)
            values = numbers.widen(_lanes_of(self.stream.kv_buf, slot, pl.ds(at, width), plan, g, values=True))
            self.state.add(g, weights, shrink, values, numbers)

    def _scores(self, group: int, slot: Any, at: Any, width: int) -> jax.Array:
        keys = _lanes_of(self.stream.kv_buf, slot, pl.ds(at, width), self.plan, group, values=False)
        queries = self.q[0, group].astype(jnp.float32)
        dots = dot(queries, self.numbers.widen(keys), 1, self.numbers.precision)
        dots = dots * across(self.constants[KEY_FACTOR, group], width)
        if self.stream.scales is not None:
            dots = dots * self.stream.scales.rows(slot, group, at, width, values=False)
        return dots if self.soft_cap is None else jnp.tanh(dots) * self.soft_cap

    def _finish(self) -> None:
        plan = self.plan
        head_of_row = lax.broadcasted_iota(jnp.int32, (plan.rows, plan.head_lanes), 0) // plan.queries_per_kv
        for g in range(plan.groups):
            out = self.state.acc[g, :, : plan.head_lanes]
            for j in range(1, plan.heads_per_group):
                lanes = slice(j * plan.head_lanes, (j + 1) * plan.head_lanes)
                out = jnp.where(head_of_row == j, self.state.acc[g, :, lanes], out)
            factor = across(self.constants[VALUE_FACTOR, g], plan.head_lanes)
            self.out[0, g] = self.state.result(g, out, factor, self.numbers).astype(self.out.dtype)


def _lanes_of(kv_buf: Any, slot: Any, tokens: Any, plan: Plan, group: int, *, values: bool) -> jax.Array:
    """Keys or values [tokens, group lanes] of a group's heads, as stored. For D = 64 both are the shared register."""
    first = group * plan.heads_per_group
    if plan.head_dim < LANES:
        shared: jax.Array = kv_buf[slot, tokens, first * LANES : (first + plan.heads_per_group) * LANES]
        return shared
    D = plan.head_dim
    starts = [2 * head * D + (D if values else 0) for head in range(first, first + plan.heads_per_group)]
    return jnp.concatenate([kv_buf[slot, tokens, start : start + D] for start in starts], axis=1)
