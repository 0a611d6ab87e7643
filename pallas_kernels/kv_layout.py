"""The physical layout of the paged KV cache: the one place that knows where a key or a value lies.

Dimension letters used across the project: T tokens of a step, S sequences, H heads, K KV heads, G query heads per KV head
(the GQA group), D head dim, P pages of the pool, L layers of a layer group, W pages of a page-table row, V vocabulary,
E hidden size, F intermediate size.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

KVOrder = Literal["head_major"]


@struct.dataclass
class KVPages:
    """The KV pages of one layer group: a pytree that the step donates.

    pages: [L, P, 2, K, page, D] in head_major order (index 0 of the third axis is K, 1 is V).
    scales: the scales of a quantized pool, None for a pool that holds plain floats.
    """

    pages: jax.Array
    scales: jax.Array | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Static description of a pool: hashable, so that it is a static argument of kernels and steps.

    order: the physical order of a page; head_major = [2, K, page, D], one contiguous [page, D] tile for each head.
    num_layers: layers of this layer group (they share page tables and a window).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    order: KVOrder = "head_major"

    def pages_shape(self, num_pages: int) -> tuple[int, ...]:
        """Shape of `KVPages.pages` for a pool of `num_pages` pages."""
        return (self.num_layers, num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def kv_head_axis(self) -> int:
        """The axis of `KVPages.pages` that tensor parallelism shards."""
        return 3

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers of the group: 2 * L * K * D * itemsize."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.page_size


def write_kv(
    kv: KVPages,
    layer: Int[Array, ""],
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
) -> KVPages:
    """Writes one layer's new keys and values at (pages[t], offsets[t]); rows of padding point at the trash page.

    In place when the pool is donated or carried by a loop.
    """
    rows = jnp.stack([keys, values], axis=1).astype(kv.pages.dtype)
    return dataclasses.replace(kv, pages=kv.pages.at[layer, pages, :, :, offsets].set(rows))


def gather_pages(kv: KVPages, layer: Int[Array, ""], page_ids: Int[Array, ...]) -> Float[Array, "... two K page D"]:
    """The pages named by `page_ids` (each within the pool) of one layer, as stored."""
    return kv.pages.at[layer, page_ids].get(mode="promise_in_bounds")
