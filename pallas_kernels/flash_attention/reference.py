"""Dense attention in plain XLA: the path of CPUs and of devices without a kernel.

Queries go in blocks; each visits the blocks of keys that it sees, with the online softmax (Milakov and Gimelshein 2018), so that
no more than a block of scores exists at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.scoring import Scoring

QUERY_BLOCK = 128
KEY_BLOCK = 256
_MASKED = -1e30
"""Finite, so that a row without any key stays free of NaN."""


def attend(
    q: Float[Array, "B Tq H D"],
    k: Float[Array, "B Tk K D"],
    v: Float[Array, "B Tk K D"],
    q_lens: Int[Array, " B"],
    kv_lens: Int[Array, " B"],
    sinks: Float[Array, " H"] | None,
    *,
    scoring: Scoring,
) -> Float[Array, "B Tq H D"]:
    """Contract: `pallas_kernels.flash_attention.api`."""
    (B, Tq, H, D), (Tk, K) = q.shape, k.shape[1:3]
    queries, keys = min(QUERY_BLOCK, Tq), min(KEY_BLOCK, Tk)
    grouped = jnp.pad(q, ((0, 0), (0, -Tq % queries), (0, 0), (0, 0))).reshape(B, -1, queries, K, H // K, D)
    grouped = grouped.transpose(1, 0, 3, 4, 2, 5)  # blocks, B, K, G, queries, D
    k, v = (jnp.pad(x, ((0, 0), (0, -Tk % keys), (0, 0), (0, 0))).transpose(0, 2, 1, 3) for x in (k, v))
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    offsets = (kv_lens - q_lens)[:, None, None]

    def one_block(block: Int[Array, ""], rows: Float[Array, "B K G queries D"]) -> Float[Array, "B K G queries D"]:
        first = block * queries
        query_at = (first + jnp.arange(queries))[None, :, None]

        def visit(step: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, acc = carry
            at = step * keys
            k_block, v_block = (jax.lax.dynamic_slice_in_dim(x, at, keys, axis=2) for x in (k, v))
            key_at = (at + jnp.arange(keys))[None, None, :]
            real = key_at < kv_lens[:, None, None]
            seen = jnp.broadcast_to(real, (B, queries, keys)) & scoring.visible(query_at + offsets, key_at)
            seen = seen[:, None, None]
            dots = jnp.einsum(
                "bkgqd,bktd->bkgqt", rows, k_block, precision=precision, preferred_element_type=jnp.float32
            )
            scores = jnp.where(seen, scoring.scores(dots), _MASKED)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
            shrink = jnp.exp(top - new_top)
            values = jnp.where(real[..., None], v_block, jnp.zeros((), v.dtype))  # 0 * NaN is NaN
            gained = jnp.einsum(
                "bkgqt,bktd->bkgqd",
                weights.astype(v.dtype),
                values,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            return new_top, total * shrink + jnp.sum(weights, axis=-1), acc * shrink[..., None] + gained

        begins, counts = scoring.blocks(first, first + queries - 1, q_lens, kv_lens, keys)
        begin = jnp.min(jnp.where(counts > 0, begins, Tk))
        stop = jnp.max(jnp.where(counts > 0, begins + counts, 0))
        carry = jax.lax.fori_loop(begin, stop, visit, _start(rows.shape, sinks))
        _, total, acc = carry
        out = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
        real: Array = query_at[:, None, None] < q_lens[:, None, None, None, None]
        return jnp.where(real, out, 0.0).astype(q.dtype)

    out: Array = jax.lax.map(lambda xs: one_block(*xs), (jnp.arange(grouped.shape[0]), grouped))
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, H, D)[:, :Tq]


def _start(shape: tuple[int, ...], sinks: Float[Array, " H"] | None) -> tuple[Array, Array, Array]:
    """Maximum, sum and weighted values before the first key. A sink is a key whose value is zero."""
    B, K, G, queries, _ = shape
    if sinks is None:
        top, total = jnp.full(shape[:-1], _MASKED, jnp.float32), jnp.zeros(shape[:-1], jnp.float32)
    else:
        top = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, K, G, 1), (B, K, G, queries))
        total = jnp.ones(shape[:-1], jnp.float32)
    return top, total, jnp.zeros(shape, jnp.float32)
