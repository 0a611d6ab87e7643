"""Ragged paged attention: prefill chunks and decodes of many sequences in one call over the paged KV cache.

Every phase of serving goes through this one entry point, on every backend.
"""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels import cuda_compiler
from pallas_kernels.backends import Backend, check_traced_chip
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.native import library
from pallas_kernels.ragged_paged_attention import cpu_native, mosaic_gpu, mosaic_tpu, mosaic_tpu_plan, reference
from pallas_kernels.scoring import Scoring


def check_supported(backend: Backend, layout: KVLayout, *, num_heads: int) -> None:
    """Raises ValueError that names what `backend` cannot do for this pool. Called when an engine is built."""
    if num_heads % layout.num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot be grouped over {layout.num_kv_heads} KV heads: one must divide the other"
        )
    if backend == "cpu_native":
        cpu_native.check_supported(layout)
    elif backend == "mosaic_tpu":
        mosaic_tpu_plan.check(layout, num_heads=num_heads)
    elif backend == "mosaic_gpu":
        mosaic_gpu.check_supported(layout, num_heads=num_heads)


def prepare(backend: Backend) -> None:
    """Makes ready what `backend` needs in this process: cpu_native builds its library, once for a machine.

    Raises NativeBuildError or CudaCompilerError with one line of reason where that is not possible. Called when an engine is built.
    """
    if backend == "cpu_native":
        library.load()
    elif backend == "mosaic_gpu":
        cuda_compiler.check()


def ragged_paged_attention(
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
    backend: Backend = "reference",
) -> Float[Array, "T H D"]:
    """Causal attention of each sequence's new queries over all of its keys, which are in the pool already.

    q: the step's tokens on one flat axis; rows [cu_q_lens[s], cu_q_lens[s + 1]) are the queries of sequence s, at positions
      kv_lens[s] - q_len ... kv_lens[s] - 1. Rows from cu_q_lens[num_seqs] on are padding: their output is finite.
    layer: which layer of the stacked pool; an array, so that the pool is never sliced.
    page_table: page ids in order of position; entries beyond a sequence's pages may be anything.
    kv_lens: tokens of each sequence, the new ones included. Keys and values beyond them are never used, NaN included.
    sliding_window: keys that a query sees, itself included. logit_soft_cap: cap * tanh(score / cap).
    sinks: one extra logit per head that takes part in the softmax with a value of zero.
    """
    if scale <= 0:
        raise ValueError(f"a scale of {scale} is not supported: it must be above 0")
    if backend == "mosaic_gpu":
        check_traced_chip("ragged paged attention")
    batch = (q, kv, layer, page_table, cu_q_lens, kv_lens, num_seqs)
    if backend == "mosaic_tpu":
        return mosaic_tpu.attend(
            *batch,
            layout=layout,
            scale=scale,
            sliding_window=sliding_window,
            logit_soft_cap=logit_soft_cap,
            sinks=sinks,
        )
    if backend == "mosaic_gpu":
        spec = mosaic_gpu.call_spec(
            layout,
            num_heads=q.shape[1],
            scale=scale,
            sliding_window=sliding_window,
            logit_soft_cap=logit_soft_cap,
            has_sinks=sinks is not None,
        )
        return mosaic_gpu.attend(*batch, spec=spec, sinks=sinks)
    scoring = Scoring(scale, True, sliding_window, logit_soft_cap)
    if backend == "cpu_native":
        return cpu_native.attend(*batch, scoring=scoring, sinks=sinks)
    return reference.attend(*batch, layout=layout, scoring=scoring, sinks=sinks)
