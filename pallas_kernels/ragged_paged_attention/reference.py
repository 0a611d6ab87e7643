"""Ragged paged attention in plain XLA: the oracle of every other backend, and the path of devices without a kernel.

Two loops share the work. Sequences with one query (decodes) go together, block of pages by block of pages, up to the longest
of them. Sequences with more queries (prefill chunks) are cut into query tiles; a tile visits only its own sequence's pages up to
its last query. Both use the online softmax (Milakov and Gimelshein 2018), so that no score matrix or cache copy of a whole
context ever exists.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_layout import KVLayout, KVPages, read_pages
from pallas_kernels.scoring import Scoring

DECODE_BLOCK_TOKENS = 128
PREFILL_BLOCK_TOKENS = 128
QUERY_TILE = 64
_MASKED = -1e30
"""Finite, so that a row without any key stays free of NaN."""


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
    scoring: Scoring,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H D"]:
    """Contract: `pallas_kernels.ragged_paged_attention.api`."""
    S, _ = page_table.shape
    page_table = jnp.clip(page_table, 0, kv.pages.shape[1] - 1)
    real = jnp.arange(S) < num_seqs
    q_lens = jnp.where(real, jnp.diff(cu_q_lens), 0)
    grouped = q.reshape(q.shape[0], layout.num_kv_heads, -1, layout.head_dim)
    grouped_sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(layout.num_kv_heads, -1)
    out = _decode(
        grouped, kv, layer, page_table, cu_q_lens, jnp.where(q_lens == 1, kv_lens, 0), layout, scoring, grouped_sinks
    )
    out = _prefill(out, grouped, kv, layer, page_table, cu_q_lens, q_lens, kv_lens, layout, scoring, grouped_sinks)
    return out.reshape(q.shape)


def _decode(
    q: Float[Array, "T K G D"],
    kv: KVPages,
    layer: Int[Array, ""],
    page_table: Int[Array, "S W"],
    cu_q_lens: Int[Array, " S+1"],
    lens: Int[Array, " S"],
    layout: KVLayout,
    scoring: Scoring,
    sinks: Float[Array, "K G"] | None,
) -> Float[Array, "T K G D"]:
    """Attention of the sequences with one query; lens is 0 for all others. Rows of the others are 0."""
    (T, K, G, D), (S, W) = q.shape, page_table.shape
    block_pages = min(max(DECODE_BLOCK_TOKENS // layout.page_size, 1), W)
    block = block_pages * layout.page_size
    page_table = _pad_columns(page_table, block_pages)
    rows = jnp.where(lens > 0, cu_q_lens[:-1], T)
    queries = q.at[rows].get(mode="fill", fill_value=0)
    at = lens - 1

    def visit(step: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        ids = jax.lax.dynamic_slice_in_dim(page_table, step * block_pages, block_pages, axis=1)
        by_page = read_pages(kv, layer, ids, layout, q.dtype)
        keys, values = (jnp.moveaxis(part, 2, 1).reshape(S, K, block, D) for part in by_page)
        key_at = step * block + jnp.arange(block)
        seen = scoring.visible(at[:, None], key_at[None, :])
        dots = jnp.einsum("skgd,sktd->skgt", queries, keys, preferred_element_type=jnp.float32)
        values = jnp.where((key_at[None, :] < lens[:, None])[:, None, :, None], values, jnp.zeros((), values.dtype))
        return _fold(carry, scoring.scores(dots), seen[:, None, None, :], values, "skgt,sktd->skgd")

    first = jnp.min(jnp.where(lens > 0, scoring.first_visible(at) // block, 2**31 - 1))
    stop = (jnp.max(lens) + block - 1) // block
    out = _softmax_of(jax.lax.fori_loop(first, stop, visit, _start((S, K, G), D, sinks)))
    return jnp.zeros_like(q).at[rows].set(out.astype(q.dtype), mode="drop")


def _prefill(
    out: Float[Array, "T K G D"],
    q: Float[Array, "T K G D"],
    kv: KVPages,
    layer: Int[Array, ""],
    page_table: Int[Array, "S W"],
    cu_q_lens: Int[Array, " S+1"],
    q_lens: Int[Array, " S"],
    kv_lens: Int[Array, " S"],
    layout: KVLayout,
    scoring: Scoring,
    sinks: Float[Array, "K G"] | None,
) -> Float[Array, "T K G D"]:
    """Writes the rows of the sequences with more than one query into `out`."""
    (T, K, G, D), W = q.shape, page_table.shape[1]
    if T == 1:
        return out
    tile = min(QUERY_TILE, T)
    block_pages = min(max(PREFILL_BLOCK_TOKENS // layout.page_size, 1), W)
    block = block_pages * layout.page_size
    page_table = _pad_columns(page_table, block_pages)
    tiles_of = jnp.where(q_lens > 1, (q_lens + tile - 1) // tile, 0)
    tiles_until = jnp.cumsum(tiles_of)
    padded_q = jnp.pad(q, ((0, tile), (0, 0), (0, 0), (0, 0)))
    padded_out = jnp.pad(out, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def do_tile(index: Int[Array, ""], out: Array) -> Array:
        s = jnp.searchsorted(tiles_until, index, side="right")
        first_row = (index - (tiles_until[s] - tiles_of[s])) * tile
        row0 = cu_q_lens[s] + first_row
        query_at = kv_lens[s] - q_lens[s] + first_row + jnp.arange(tile)
        queries = jax.lax.dynamic_slice_in_dim(padded_q, row0, tile)
        queries = queries.transpose(1, 2, 0, 3).reshape(K, G * tile, D)

        def visit(step: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            ids = jax.lax.dynamic_slice_in_dim(page_table[s], step * block_pages, block_pages)
            by_page = read_pages(kv, layer, ids, layout, q.dtype)
            keys, values = (jnp.moveaxis(part, 1, 0).reshape(K, block, D) for part in by_page)
            key_at = step * block + jnp.arange(block)
            in_context = key_at < kv_lens[s]
            values = jnp.where(in_context[None, :, None], values, jnp.zeros((), values.dtype))
            seen = scoring.visible(query_at[:, None], key_at[None, :]) & in_context[None, :]
            seen = jnp.broadcast_to(seen, (G, tile, block)).reshape(1, G * tile, block)
            dots = jnp.einsum("kqd,ktd->kqt", queries, keys, preferred_element_type=jnp.float32)
            return _fold(carry, scoring.scores(dots), seen, values, "kqt,ktd->kqd")

        last = jnp.minimum(query_at[-1], kv_lens[s] - 1)
        tile_sinks = None if sinks is None else jnp.repeat(sinks, tile, axis=1)
        carry = _start((K, G * tile), D, tile_sinks)
        carry = jax.lax.fori_loop(scoring.first_visible(query_at[0]) // block, last // block + 1, visit, carry)
        result = _softmax_of(carry).reshape(K, G, tile, D).transpose(2, 0, 1, 3).astype(out.dtype)
        mine = jnp.arange(tile) < q_lens[s] - first_row
        before = jax.lax.dynamic_slice_in_dim(out, row0, tile)
        result = jnp.where(mine[:, None, None, None], result, before)
        return jax.lax.dynamic_update_slice_in_dim(out, result, row0, axis=0)

    filled: Array = jax.lax.fori_loop(0, tiles_until[-1], do_tile, padded_out)
    return filled[:T]


def _start(shape: tuple[int, ...], D: int, sinks: Float[Array, ...] | None) -> tuple[Array, Array, Array]:
    """Running maximum, sum and weighted values. A sink is a key whose value is zero: it only enters maximum and sum."""
    if sinks is None:
        top, total = jnp.full(shape, _MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        top, total = jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32)
    return top, total, jnp.zeros((*shape, D), jnp.float32)


def _fold(
    carry: tuple[Array, Array, Array],
    scores: Float[Array, ...],
    seen: Array,
    values: Float[Array, ...],
    contraction: str,
) -> tuple[Array, Array, Array]:
    """One block of the online softmax. Scores that are not seen may be anything; values must be finite (0 * NaN is NaN)."""
    top, total, acc = carry
    scores = jnp.where(seen, scores, _MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
    shrink = jnp.exp(top - new_top)
    gained = jnp.einsum(contraction, weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return new_top, total * shrink + jnp.sum(weights, axis=-1), acc * shrink[..., None] + gained


def _softmax_of(carry: tuple[Array, Array, Array]) -> Float[Array, ...]:
    _, total, acc = carry
    return acc / jnp.where(total == 0.0, 1.0, total)[..., None]


def _pad_columns(page_table: Int[Array, "S W"], multiple: int) -> Int[Array, "S W_padded"]:
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % multiple)))
