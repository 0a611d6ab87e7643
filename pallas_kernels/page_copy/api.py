"""Page copy: whole pages of the pool, in all layers, with their token scales. For copy-on-write and for swapping."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.backends import Backend, check_traced_chip
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.page_copy import mosaic_gpu, mosaic_tpu, reference


def kernel_of(backend: Backend) -> Backend:
    """What copies pages where attention runs on `backend`: on a CPU it is XLA, whose copies of whole pages are native code."""
    return "reference" if backend == "cpu_native" else backend


def check_supported(backend: Backend, layout: KVLayout) -> None:
    """Raises ValueError that names what `backend` cannot copy. Called when an engine is built."""
    if backend == "mosaic_gpu":
        mosaic_gpu.check(layout)
    elif backend == "mosaic_tpu" and layout.order != "token_major":
        raise ValueError(f"page copy on backend 'mosaic_tpu' takes token_major pools, not {layout.order}")


def copy_pages(
    kv: KVPages,
    src_ids: Int[Array, " N"],
    dst_ids: Int[Array, " N"],
    *,
    layout: KVLayout,
    backend: Backend = "reference",
) -> KVPages:
    """The pool with page dst_ids[i] a copy of page src_ids[i], in every layer; in place when the pool is donated.

    No page but the trash page, the last one, may be a target twice, or both a source and a target. Pairs of padding have the trash
    page as their target, and copy nothing. Raises ValueError for ids of different shapes.
    """
    if src_ids.ndim != 1 or src_ids.shape != dst_ids.shape:
        raise ValueError(
            f"page copy takes pairs of ids: src_ids {src_ids.shape} and dst_ids {dst_ids.shape} must be [N]"
        )
    check_supported(backend, layout)
    if backend == "mosaic_tpu":
        return _copy_on_tpu(kv, src_ids, dst_ids, layout)
    if backend == "mosaic_gpu":
        check_traced_chip("page copy")
        return mosaic_gpu.copy(kv, src_ids, dst_ids, layout=layout)
    return reference.copy(kv, src_ids, dst_ids, layout=layout)


def _copy_on_tpu(kv: KVPages, src_ids: Array, dst_ids: Array, layout: KVLayout) -> KVPages:
    """The kernel takes a number of pairs: those that are no padding come first."""
    is_padding = dst_ids == kv.pages.shape[1] - 1
    order = jnp.argsort(is_padding, stable=True)
    pairs = (src_ids[order].astype(jnp.int32), dst_ids[order].astype(jnp.int32), jnp.sum(~is_padding))
    pages = mosaic_tpu.copy_pages(kv.pages, *pairs)
    if layout.scales != "token" or kv.scales is None:
        return KVPages(pages, kv.scales)
    return KVPages(pages, mosaic_tpu.copy_pages(kv.scales, *pairs))
