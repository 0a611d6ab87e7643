"""KV write on NVIDIA Hopper: one block of the grid writes one token's keys and values, quantizing on the way.

The pool and its token scales are references, so that the kernel writes in place: a row of D numbers for each KV head and, in the
same pass, its scale. A warp holds whole rows, 32 lanes side by side, so that the largest number of a row is a reduction in the
warp and its stores are contiguous. No shared memory: a step moves a few megabytes at most, and many small blocks hide latency.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write.quantize import saturate, scale_of_peak
from pallas_kernels.mosaic_gpu_store import store

KERNEL_NAME = "kv_write"
_WARPS, _LANES = 4, 32


def write(
    kv: KVPages,
    layer: Int[Array, ""],
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    *,
    layout: KVLayout,
) -> KVPages:
    """Contract: `pallas_kernels.kv_write.api`, for head_major pools with a head_dim of 64, 128 or 256.

    Nothing is written to the trash page: all rows of padding point there, and would race.
    """
    T, K, D = keys.shape
    P = kv.pages.shape[1]
    # Views of one row per (layer, page, K or V): no copy.
    pool = jax.new_ref(kv.pages.reshape(-1, K, layout.page_size, D))
    scales: Any = None
    dynamic = layout.scales == "token"
    if kv.scales is not None:
        scales = jax.new_ref(kv.scales.reshape(-1, K, layout.page_size)) if dynamic else kv.scales.reshape(-1, K)
    rows_layout = _rows_of_warps(K, D)

    def body(*refs: Any) -> None:
        keys, values, layer_ref, pages_ref, offsets_ref, pool, *rest = refs
        scale_ref = rest[0] if rest else None
        token = lax.axis_index("token")
        page, offset, layer = pages_ref[token], offsets_ref[token], layer_ref[0]

        @pl.when(page != P - 1)
        def _write() -> None:
            # Both are on their way before the first is stored.
            rows = [plgpu.load(ref.at[token], layout=rows_layout, optimized=False) for ref in (keys, values)]
            for which, row in enumerate(rows):
                at = (layer * P + page) * 2 + which
                stored = _stored(row, layout, scale_ref, at if dynamic else layer * 2 + which, offset, rows_layout)
                store(pool.at[at, :, offset], stored)

    where = [jnp.asarray(layer).reshape(1), pages, offsets]
    inputs = [keys, values, *(ids.astype(jnp.int32) for ids in where), pool]
    # Blocks share no memory, and a block nothing with itself.
    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True)
    plgpu.kernel(body, grid=(T,), grid_names=("token",), kernel_name=KERNEL_NAME, compiler_params=params)(
        *inputs, *([] if scales is None else [scales])
    )
    new_scales = scales[...].reshape(kv.scales.shape) if dynamic and kv.scales is not None else kv.scales
    return KVPages(pool[...].reshape(kv.pages.shape), new_scales)


def _stored(
    rows: Float[Array, "K D"], layout: KVLayout, scale_ref: Any, at: Array, offset: Array, rows_layout: Any
) -> Array:
    """The rows as the pool stores them. Token scales are made here and stored at (at, :, offset), static ones read at `at`."""
    if layout.scales == "none":
        return rows.astype(layout.dtype)
    rows = rows.astype(jnp.float32)
    if layout.scales == "token":
        scale = scale_of_peak(jnp.abs(rows).max(axis=1), layout.dtype)
        store(scale_ref.at[at, :, offset], scale)
    else:
        scale = plgpu.load(scale_ref.at[at], layout=rows_layout.reduce(1), optimized=False)
    return saturate(rows / lax.broadcast_in_dim(scale, rows.shape, [0]), layout.dtype)


def _rows_of_warps(K: int, D: int) -> Any:
    """[K, D] over a warpgroup: each row in one warp. With fewer rows at a time than warps, warps repeat each other."""
    rows, vector = math.gcd(K, _WARPS), (D // _LANES,)
    if rows == 1:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((1, D), vector)), warp_dims=(plgpu.Replicated(_WARPS),), lane_dims=(-2,), vector_dim=-1
        )
    warps = (-3,) if rows == _WARPS else (-3, plgpu.Replicated(_WARPS // rows))
    return plgpu.Layout.TILED(plgpu.Tiling(((rows, D), vector)), warp_dims=warps, lane_dims=(-2,), vector_dim=-1)
