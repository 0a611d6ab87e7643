"""The KV pool: pages on the devices of a mesh, sharded over KV heads, one group of layers after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.kv_layout import KVLayout, KVPages

KVPool = tuple[KVPages, ...]
"""One entry per layer group: layers that share page tables and a window. Donated to every step."""


def page_spec(layout: KVLayout) -> PartitionSpec:
    """How `KVPages.pages` lies on the mesh: KV heads over the `tensor` axis."""
    return PartitionSpec(*(("tensor" if axis == layout.kv_head_axis else None) for axis in range(6)))


def pool_shardings(mesh: Mesh, layout: KVLayout) -> KVPool:
    """A pool-shaped tree of shardings."""
    return (KVPages(pages=NamedSharding(mesh, page_spec(layout))),)  # type: ignore[arg-type]


def create_pool(mesh: Mesh, layout: KVLayout, num_blocks: int) -> KVPool:
    """A zeroed pool of num_blocks pages and one more, the trash page, which takes the writes of padding and is never read."""
    shape = layout.pages_shape(num_blocks + 1)
    shardings = pool_shardings(mesh, layout)
    make = jax.jit(lambda: (KVPages(pages=jnp.zeros(shape, layout.dtype)),), out_shardings=shardings)
    pool: KVPool = make()
    return pool
