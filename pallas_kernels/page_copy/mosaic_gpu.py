"""Page copy on NVIDIA Hopper: TMA brings a part of a page to shared memory and back to its new place.

A block of the grid copies one head's keys or values of a page in one layer, at most 128 tokens. It uses few registers and no more
shared memory than the part, so that many blocks are on an SM at once and keep loads and stores in flight.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.kv_layout import KVLayout, KVPages

KERNEL_NAME = "page_copy"
_MAX_TOKENS = 128


def check(layout: KVLayout) -> None:
    """Raises ValueError that names what this kernel cannot copy."""
    if layout.order != "head_major":
        raise ValueError(f"page copy on backend 'mosaic_gpu' takes head_major pools, not {layout.order}")
    if layout.page_size % min(layout.page_size, _MAX_TOKENS):
        raise ValueError(
            f"page copy on backend 'mosaic_gpu' takes pages of up to {_MAX_TOKENS} tokens or a multiple of it, "
            f"not {layout.page_size}"
        )


def copy(kv: KVPages, src_ids: Int[Array, " N"], dst_ids: Int[Array, " N"], *, layout: KVLayout) -> KVPages:
    """Contract: `pallas_kernels.page_copy.api`, for head_major pools."""
    L, P, _, K, page, D = kv.pages.shape
    tokens = min(page, _MAX_TOKENS)
    rows, parts = 2 * K, page // tokens
    # Views of one row per (layer, page, K or V, head): no copy.
    pools = [jax.new_ref(kv.pages.reshape(-1, page, D))]
    if layout.scales == "token" and kv.scales is not None:
        pools.append(jax.new_ref(kv.scales.reshape(-1, page)))

    def body(src: Any, dst: Any, *refs: Any, buffers: list[Any], loaded: Any) -> None:
        pair, layer, part = (lax.axis_index(name) for name in ("pair", "layer", "part"))
        source, target = src[pair], dst[pair]
        row = lax.div(part, jnp.int32(parts))
        within = pl.ds(pl.multiple_of(lax.rem(part, jnp.int32(parts)) * tokens, tokens), tokens)

        @pl.when(target != P - 1)
        def _copy() -> None:
            def place(ref: Any, page_id: Array) -> Any:
                return ref.at[(layer * P + page_id) * rows + row, within]

            for ref, buffer in zip(refs, buffers, strict=True):
                plgpu.copy_gmem_to_smem(place(ref, source), buffer, loaded)
            plgpu.barrier_wait(loaded)
            for ref, buffer in zip(refs, buffers, strict=True):
                plgpu.copy_smem_to_gmem(buffer, place(ref, target))
            plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        grid=(src_ids.shape[0], L, rows * parts),
        grid_names=("pair", "layer", "part"),
        kernel_name=KERNEL_NAME,
        scratch_types={
            "buffers": [plgpu.SMEM((tokens, *ref.shape[2:]), ref.dtype) for ref in pools],
            "loaded": plgpu.Barrier(num_arrivals=len(pools)),
        },
    )(src_ids.astype(jnp.int32), dst_ids.astype(jnp.int32), *pools)
    pages, *scales = (ref[...] for ref in pools)
    return KVPages(pages.reshape(kv.pages.shape), scales[0].reshape(L, P, 2, K, page) if scales else kv.scales)
