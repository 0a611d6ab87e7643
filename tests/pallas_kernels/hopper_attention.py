"""Calls the Hopper attention kernels in the interpreter, on batches of the dense oracle, and compares the two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from fixtures.gpu_interpreter import gpu_interpreter
from oracle_dense import Batch, attend, relative_error

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention import mosaic_gpu

BOUND = 1e-2
"""Of 16-bit arithmetic: probabilities and outputs have 8 bits at least. Pools are exact: the oracle reads what is stored."""


def run(
    batch: Batch,
    scales: str = "none",
    *,
    decode_only: bool = False,
    sinks: np.ndarray | None = None,
    num_sms: int = 2,
    **options: object,
) -> np.ndarray:
    _, _, _, K, page, D = batch.pages.shape
    layout = KVLayout(batch.pages.shape[0], K, D, page, str(batch.pages.dtype), scales=scales)
    H = batch.q.shape[1]
    mosaic_gpu.check_supported(layout, num_heads=H)
    spec = mosaic_gpu.call_spec(layout, num_heads=H, scale=D**-0.5, has_sinks=sinks is not None, **options)

    def call(q: jax.Array, kv: KVPages, layer: jax.Array, *rest: jax.Array) -> jax.Array:
        *arrays, sinks = rest
        return mosaic_gpu.attend(
            q, kv, layer, *arrays, spec=spec, sinks=sinks, decode_only=decode_only, num_sms=num_sms
        )

    kv = KVPages(jnp.asarray(batch.pages), None if batch.scales is None else jnp.asarray(batch.scales))
    arrays = (batch.page_table, batch.cu_q_lens, batch.kv_lens, np.int32(batch.num_seqs))
    with gpu_interpreter():
        out = jax.jit(call)(
            jnp.asarray(batch.q),
            kv,
            np.int32(batch.layer),
            *map(jnp.asarray, arrays),
            None if sinks is None else jnp.asarray(sinks),
        )
        return np.asarray(out)


def check(
    batch: Batch,
    scales: str = "none",
    *,
    decode_only: bool = False,
    with_sinks: bool = False,
    num_sms: int = 2,
    **options: object,
) -> None:
    """Each sequence's rows are those of the oracle, and rows of padding are finite."""
    H, D = batch.q.shape[1:]
    sinks = np.random.default_rng(7).standard_normal(H).astype(np.float32) if with_sinks else None
    out = run(batch, scales, decode_only=decode_only, sinks=sinks, num_sms=num_sms, **options)
    expected = attend(batch, scale=D**-0.5, sinks=sinks, **options)
    for s in range(batch.num_seqs):
        rows = slice(batch.cu_q_lens[s], batch.cu_q_lens[s + 1])
        if rows.start < rows.stop:
            assert relative_error(out[rows], expected[rows]) < BOUND, f"sequence {s}"
    assert np.isfinite(out.astype(np.float32)).all()
