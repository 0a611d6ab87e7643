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
from pallas_kernels.ragged_paged_attention.reference import Scoring

KV_DTYPES = ("float32", "bfloat16", "int8")
"""An int8 pool has float32 scales per token and head, [L, P, 2, K, page], that keys and values are multiplied by."""


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
    library.load()
    nothing = jnp.zeros((0,), jnp.float32)
    call = jax.ffi.ffi_call("jaxkv_ragged_paged_attention", q)
    out: Array = call(
        q,
        kv.pages,
        nothing if kv.scales is None else kv.scales,
        jnp.asarray(layer, jnp.int32),
        page_table.astype(jnp.int32),
        cu_q_lens.astype(jnp.int32),
        kv_lens.astype(jnp.int32),
        jnp.asarray(num_seqs, jnp.int32).reshape(()),
        nothing if sinks is None else sinks.astype(jnp.float32),
        scale=np.float32(scoring.scale),
        window=np.int64(scoring.sliding_window or 0),
        soft_cap=np.float32(scoring.logit_soft_cap or 0.0),
    )
    return out
