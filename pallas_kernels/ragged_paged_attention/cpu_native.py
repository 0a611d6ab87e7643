"""Ragged paged attention on CPU in native code (`cpu_native.cc`): pages are read in place, once for a KV head's queries.

A query's output is the same to the bit whatever the other sequences, the number of threads, and how its prompt is cut into
chunks: decodes and prefill chunks do the same arithmetic in the same order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.native import library
from pallas_kernels.scoring import Scoring

KV_DTYPES = ("float32", "bfloat16", "int8")
"""An int8 pool has float32 scales per token and head, [L, P, 2, K, page], or static ones, [L, 2, K]."""


_STATIC_DIMS = 3


def check_supported(layout: KVLayout) -> None:
    """Raises ValueError for a pool that this backend cannot read."""
    if layout.order != "head_major":
        raise ValueError(f"attention backend 'cpu_native' reads head_major pools, not {layout.order}")
    if jnp.dtype(layout.dtype).name not in KV_DTYPES:
        raise ValueError(f"attention backend 'cpu_native' reads {', '.join(KV_DTYPES)} pools, not {layout.dtype}")


def attend(
    q: Float[Array, "T H D"],
    kv: KVPages,
    layer: Int[Array, ""],
    page_table: Int[Array, "S W"],
    cu_q_lens: Int[Array, " S+1"],
    kv_lens: Int[Array, " S"],
    num_seqs: Int[Array, ""],
    *,
    scoring: Scoring,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H D"]:
    """Contract: `pallas_kernels.ragged_paged_attention.api`; q is float32 or bfloat16. Raises NativeBuildError while tracing."""
    tables = (layer, page_table, cu_q_lens, kv_lens, num_seqs)
    if kv.scales is None or kv.scales.ndim > _STATIC_DIMS:
        return _call(q, kv.pages, kv.scales, *tables, scoring=scoring, sinks=sinks)
    # A head's static scales factor out: the keys' goes into its queries, the values' into its output.
    of_heads = jnp.repeat(kv.scales[layer], q.shape[1] // kv.scales.shape[2], axis=1)[:, None, :, None]
    scaled = q.astype(jnp.float32) * of_heads[0]
    out = _call(scaled, kv.pages, None, *tables, scoring=scoring, sinks=sinks) * of_heads[1]
    return out.astype(q.dtype)


def _call(
    q: Float[Array, "T H D"],
    pages: Array,
    token_scales: Float[Array, "L P 2 K page"] | None,
    layer: Int[Array, ""],
    *tables: Array,
    scoring: Scoring,
    sinks: Float[Array, " H"] | None,
) -> Float[Array, "T H D"]:
    """The native function; int8 pages without scales are plain numbers."""
    library.load()
    nothing = jnp.zeros((0,), jnp.float32)
    call = jax.ffi.ffi_call("jaxkv_ragged_paged_attention", q)
    out: Array = call(
        q,
        pages,
        nothing if token_scales is None else token_scales,
        jnp.asarray(layer, jnp.int32),
        *(jnp.asarray(table, jnp.int32) for table in tables),
        nothing if sinks is None else sinks.astype(jnp.float32),
        scale=np.float32(scoring.scale),
        window=np.int64(scoring.sliding_window or 0),
        soft_cap=np.float32(scoring.logit_soft_cap or 0.0),
    )
    return out
