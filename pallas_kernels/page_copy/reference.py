"""Page copy in plain XLA: a gather and a scatter, in place when the pool is donated."""

from __future__ import annotations

from jaxtyping import Array, Int

from pallas_kernels.kv_layout import KVLayout, KVPages


def copy(kv: KVPages, src_ids: Int[Array, " N"], dst_ids: Int[Array, " N"], *, layout: KVLayout) -> KVPages:
    """Contract: `pallas_kernels.page_copy.api`."""
    trash = kv.pages.shape[1] - 1
    # Beyond the pool: XLA drops it.
    targets = dst_ids + (dst_ids == trash)

    def copied(pool: Array) -> Array:
        return pool.at[:, targets].set(pool[:, src_ids], mode="drop")

    if layout.scales != "token" or kv.scales is None:
        return KVPages(copied(kv.pages), kv.scales)
    return KVPages(copied(kv.pages), copied(kv.scales))
