"""The KV pool: pages on the devices of a mesh, sharded over KV heads, one group of layers after the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from pallas_kernels.kv_layout import KVLayout, KVPages

KVPool = tuple[KVPages, ...]
"""One entry per layer group: layers that share page tables and a window. Donated to every step."""


def pool_specs(layout: KVLayout) -> Any:
    """How one layer group lies on the mesh, KV heads over the `tensor` axis: KVPages of PartitionSpecs."""
    scales = None if layout.scales == "none" else PartitionSpec(*[None] * layout.scales_head_axis, "tensor")
    pages: Any = PartitionSpec(*[None] * layout.pages_head_axis, "tensor")
    return KVPages(pages, scales)  # type: ignore[arg-type]


def pool_shardings(mesh: Mesh, layout: KVLayout) -> Any:
    """A pool-shaped tree of shardings."""
    return (jax.tree.map(lambda spec: NamedSharding(mesh, spec), pool_specs(layout)),)


def create_pool(
    mesh: Mesh, layout: KVLayout, num_blocks: int, static_scales: Float[np.ndarray, "L 2 K"] | None = None
) -> KVPool:
    """A zeroed pool of num_blocks pages and one more, the trash page, which takes the writes of padding and is never read.

    static_scales: float32, of a pool whose layout has static scales; its own copy of them becomes part of the pool.
    """
    pages, scales = layout.pages_shape(num_blocks + 1), layout.scales_shape(num_blocks + 1)
    if (static_scales is not None) != (layout.scales == "static"):
        raise ValueError(f"a pool with scales {layout.scales!r} was given static scales {static_scales is not None}")

    def empty() -> KVPool:
        ones = None if scales is None else jnp.ones(scales, jnp.float32)
        return (KVPages(jnp.zeros(pages, layout.pages_dtype), ones),)

    shardings = pool_shardings(mesh, layout)
    pool: KVPool = jax.jit(empty, out_shardings=shardings)()
    if static_scales is None:
        return pool
    return (dataclasses.replace(pool[0], scales=jax.device_put(static_scales, shardings[0].scales)),)
