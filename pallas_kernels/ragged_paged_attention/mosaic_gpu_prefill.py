"""Attention of sequences with several queries (prefill chunks, draft verification) on Hopper.

A work item is 128 query rows of one sequence and one KV head: two consumer warpgroups with 64 rows each (`consume`). A
warpgroup's rows are `span` consecutive tokens times the `heads` query heads that share the KV head, row = head * span
+ token, so that K and V are read once for all of them. A third warpgroup (`produce`) issues the TMA copies of pages into rings of
shared memory, and converts 8-bit pages to 16 bits. The grid is persistent: items are sorted by cost and dealt out in a snake.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper.memory import Ref, tiled
from pallas_kernels.hopper.warpgroups import CONSUMERS, ROWS, in_roles
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import CallSpec, pool_rows, scale_rows
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_call import Call
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_consume import consume
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_output import zero_padding
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_plan import PrefillTuning, staged_columns
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_produce import produce, produce_converted
from pallas_kernels.scoring import LOG2E


def prefill(
    q: Float[Array, "T H D"],
    pages: Array,
    scales: Array | None,
    layer: Int[Array, ""],
    page_table: Int[Array, "S W"],
    tiles: Int[Array, "tiles 5"],
    counts: Int[Array, " 2"],
    sinks: Float[Array, " H"] | None,
    *,
    spec: CallSpec,
    tuning: PrefillTuning,
) -> Float[Array, "T H D"]:
    """Attention of the queries that `tiles` names. q has spec.compute_dtype, and T >= span.

    counts: the number of tiles in use, and the row from which on there is only padding: those rows are zero in the
    result. The rows of sequences that have no tile are not written.
    """
    columns = jnp.arange(tuning.keys, dtype=jnp.int32)
    inputs = [q, pool_rows(pages), layer.reshape(1).astype(jnp.int32), page_table, tiles, counts, columns]
    if scales is not None:
        inputs.append(scale_rows(scales))
    if sinks is not None:
        inputs.append(sinks.astype(jnp.float32) * LOG2E)
    has_scales = scales is not None

    def body(*refs: Ref, **scratch: Ref) -> None:
        q_ref, pool, layer_ref, table, tile_ref, count_ref, column_ref, *rest, out_ref = refs
        scale_ref = rest.pop(0) if has_scales else None
        sink_ref = rest.pop(0) if spec.has_sinks else None
        shared = (q_ref, pool, layer_ref, table, tile_ref, count_ref, column_ref, scale_ref, sink_ref, out_ref)
        _run(Call(spec, tuning, pages.shape[1], q.shape[0], *shared, scratch))

    return plgpu.kernel(  # type: ignore[no-any-return]
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, spec.compute_dtype),
        grid=(tuning.num_blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=_scratch(spec, tuning),
    )(*inputs)


def _run(call: Call) -> None:
    """The kernel's code."""
    wg = lax.axis_index("wg")

    def compute() -> None:
        consume(call, wg)
        zero_padding(call, wg)

    in_roles(
        wg, call.tuning.registers, compute, lambda: produce_converted(call) if call.spec.quantized else produce(call)
    )


def _scratch(spec: CallSpec, tuning: PrefillTuning) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    D, keys, stages, converted = spec.head_dim, tuning.keys, tuning.stages, tuning.converted
    dynamic, compute = spec.scales == "token", spec.compute_dtype
    arrivals = spec.page_copies(keys) * (2 if dynamic else 1)
    scratch = {
        "q_smem": tiled((CONSUMERS, ROWS, D), compute),
        "out_smem": plgpu.SMEM((CONSUMERS, ROWS, staged_columns(spec)), compute),
        "sums": plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
        # Few arrays of barriers rather than many barriers: each array costs the consumers a uniform register.
        "queries": plgpu.Barrier(num_barriers=2 * CONSUMERS),
        "full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=2 * stages),
    }
    for name in "kv":
        scratch[f"{name}_stored"] = tiled((stages, keys, D), jnp.dtype(spec.kv_dtype))
        if dynamic:
            scratch[f"{name}_scale"] = plgpu.SMEM((stages, keys), jnp.float32)
        if spec.quantized:
            scratch[f"{name}_converted"] = tiled((converted, keys, D), compute)
    if spec.quantized:
        scratch["ready"] = plgpu.Barrier(num_barriers=2 * converted)
        scratch["done"] = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=2 * converted)
    else:
        scratch["free"] = plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=2 * stages + 1)
    return scratch
