"""Ragged paged attention on TPU: prepares the operands of the two kernels and puts their results together.

Sequences with one query go through `mosaic_tpu_decode`, those with more through `mosaic_tpu_prefill`; a step without the
latter runs the former only. Contract: `pallas_kernels.ragged_paged_attention.api`. The pool is in `token_major` order
(`pallas_kernels.kv_orders_tpu`) and is only read, in place, at the layer that a scalar names.

Scales: `kv.scales` is None, or [L, 2, K] (one per layer and head, keys then values), or the token scales of
`kv_orders_tpu.token_scales_shape`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention import mosaic_tpu_decode as decode_kernel
from pallas_kernels.ragged_paged_attention import mosaic_tpu_prefill as prefill_kernel
from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import (
    LOG2E,
    NOTHING,
    HeadConstants,
    Numbers,
    numbers_of,
)
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import LANES, Plan, make_plan
from pallas_kernels.ragged_paged_attention.mosaic_tpu_stream import Pool, Tables

MAX_TABLE_ENTRIES = 196_608
"""768 KiB of a core's 1 MiB of scalar memory."""


def attend(
    q: Float[Array, "T H D"],
    kv: KVPages,
    layer: Int[Array, ""],
    page_table: Int[Array, "S W"],
    cu_q_lens: Int[Array, " S+1"],
    kv_lens: Int[Array, " S"],
    num_seqs: Int[Array, ""],
    *,
    layout: KVLayout,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    plan: Plan | None = None,
    interpret: Any = False,
) -> Float[Array, "T H D"]:
    """Attention over the pool. `plan` overrides the block sizes; `interpret` is `pl.pallas_call`'s."""
    T, H, _ = q.shape
    S, W = page_table.shape
    if plan is None:
        plan = make_plan(layout, num_heads=H, num_tokens=T, pages_per_seq=W)
    numbers = numbers_of(kv.pages.dtype)
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    has_token_scales = kv.scales is not None and kv.scales.ndim == 4
    constants = _head_constants(kv, layer, numbers, plan, scale, logit_soft_cap, sinks)
    if S * W > MAX_TABLE_ENTRIES:
        raise ValueError(
            f"attention backend 'mosaic_tpu' keeps the page table in scalar memory: {S} sequences x {W} pages exceed its "
            f"{MAX_TABLE_ENTRIES} entries; use larger pages, fewer sequences or a shorter max_model_len"
        )
    q_lens = jnp.where(jnp.arange(S) < num_seqs, jnp.diff(cu_q_lens), 0)
    shared = (kv_lens, page_table.reshape(-1), layer)
    pool = Pool(kv.pages, kv.scales if has_token_scales else None)
    soft_cap = None if logit_soft_cap is None else logit_soft_cap * LOG2E
    options = {"plan": plan, "sliding_window": sliding_window, "soft_cap": soft_cap, "interpret": interpret}

    # Decodes: one item per sequence with one query, those first.
    is_decode = q_lens == 1
    order = jnp.argsort(jnp.logical_not(is_decode), stable=True).astype(jnp.int32)
    num_decodes = jnp.sum(is_decode, dtype=jnp.int32).reshape(1)
    items = (order, _first_page(kv_lens[order] - 1, sliding_window, plan), -(-kv_lens[order] // plan.page_size))
    rows = jnp.where(is_decode[order], cu_q_lens[order], T)
    queries = _block_diagonal(q.at[rows].get(mode="fill", fill_value=0), plan, numbers)
    tables = Tables(*items, num_decodes, *shared)
    decoded = decode_kernel.decode(queries, _decode_constants(constants, plan), tables, pool, **options)
    decoded = decoded[:, :, : plan.heads_per_group * plan.queries_per_kv, plan.value_lane :].reshape(S, *q.shape[1:])
    out = jnp.zeros_like(q).at[rows].set(decoded, mode="drop")
    if T == 1:
        return out
    return prefill_kernel.prefill(out, q, constants, cu_q_lens, q_lens, *shared, pool, numbers=numbers, **options)


def _first_page(query_at: Int[Array, " N"], sliding_window: int | None, plan: Plan) -> Int[Array, " N"]:
    """The first page that a query at `query_at` sees; earlier ones may have been freed."""
    if sliding_window is None:
        return jnp.zeros_like(query_at)
    return jnp.maximum(query_at - sliding_window + 1, 0) // plan.page_size


def _head_constants(
    kv: KVPages,
    layer: Int[Array, " one"],
    numbers: Numbers,
    plan: Plan,
    scale: float,
    soft_cap: float | None,
    sinks: Float[Array, " H"] | None,
) -> HeadConstants:
    shape = (plan.num_kv_heads, plan.queries_per_kv)
    key_scale = value_scale = jnp.ones(plan.num_kv_heads, jnp.float32)
    if kv.scales is not None and kv.scales.ndim == 3:
        static = kv.scales[layer[0]].astype(jnp.float32)
        key_scale, value_scale = static[0], static[1]
    unit = LOG2E if soft_cap is None else 1.0 / soft_cap
    if sinks is None:
        top, total = jnp.full(shape, NOTHING, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        top = jnp.maximum(sinks.astype(jnp.float32).reshape(shape) * LOG2E, NOTHING)
        total = jnp.full(shape, 2.0**numbers.gain, jnp.float32)
    return HeadConstants(
        key_factor=key_scale * (scale * numbers.restore * unit),
        value_factor=value_scale * numbers.restore,
        start_top=top,
        start_total=total,
    )


def _decode_constants(constants: HeadConstants, plan: Plan) -> Float[Array, "four groups rows lanes"]:
    """The constants as rows of the decode kernel. A start total sits in lane 0, as totals stay spread over lanes."""
    factors = [field[:, None] for field in (constants.key_factor, constants.value_factor)]
    fields = [*factors, constants.start_top, constants.start_total]
    shape = (plan.groups, plan.heads_per_group, plan.queries_per_kv)
    stacked = jnp.stack([jnp.broadcast_to(field.reshape(*shape[:2], -1), shape) for field in fields])
    stacked = stacked.reshape(4, plan.groups, -1)
    stacked = jnp.pad(stacked, ((0, 0), (0, 0), (0, plan.rows - stacked.shape[2])))
    lanes = jnp.broadcast_to(stacked[..., None], (*stacked.shape, LANES))
    first_lane = jnp.arange(LANES) == 0
    return lanes.at[decode_kernel.START_TOTAL].multiply(first_lane)


def _block_diagonal(q: Float[Array, "N H D"], plan: Plan, numbers: Numbers) -> Float[Array, "N groups rows lanes"]:
    """Queries of a group's heads as rows; those of head j occupy the lanes of head j and are zero elsewhere."""
    n, G, D = plan.heads_per_group, plan.queries_per_kv, plan.head_dim
    heads = q.reshape(q.shape[0], plan.groups, n, G, D) * jnp.asarray(2.0**numbers.gain, q.dtype)
    heads = jnp.pad(heads, ((0, 0), (0, 0), (0, 0), (0, 0), (0, plan.head_lanes - D)))
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    spread = jnp.where(own, heads[..., None, :], jnp.zeros((), q.dtype))
    spread = spread.reshape(q.shape[0], plan.groups, n * G, plan.group_lanes)
    return jnp.pad(spread, ((0, 0), (0, 0), (0, plan.rows - n * G), (0, 0)))
