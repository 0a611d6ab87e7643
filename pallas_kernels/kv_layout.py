"""The physical layout of the paged KV cache: the one place that knows where a key or a value lies.

Dimension letters used across the project: T tokens of a step, S sequences, H heads, K KV heads, G query heads per KV head
(the GQA group), D head dim, P pages of the pool, L layers of a layer group, W pages of a page-table row, V vocabulary,
E hidden size, F intermediate size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from pallas_kernels import kv_orders_tpu

KVOrder = Literal["head_major", "token_major"]
KVScales = Literal["none", "token", "static"]
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")


@struct.dataclass
class KVPages:
    """The KV pages of one layer group: a pytree that the step donates.

    pages: what `KVLayout.pages_shape` says. scales: what `KVLayout.scales_shape` says, float32; None without scales.
    A stored number times its scale is the key or value.
    """

    pages: jax.Array
    scales: jax.Array | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Static description of a pool: hashable, so that it is a static argument of kernels and steps.

    num_layers: layers of this layer group (they share page tables and a window).
    order: head_major = pages of [2, K, page, D] (0 is K, 1 is V), one contiguous [page, D] tile for each head;
      token_major = pages of [page, K * 2 * D], see `kv_orders_tpu`.
    scales: of a quantized pool; token = one per token and head, made as keys and values are written; static = one per layer and
      head, given when the pool is made, so that another scale is other data and never another program.
    float8_as_bytes: FP8 numbers are held as uint8. XLA moves any bytes in place, but FP8 on a device that has none as float16, for which
      it converts the whole pool and back.
    shards: devices that the KV heads are split over. Kernels get the layout of one device: its part of the heads, 1 shard.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    order: KVOrder = "head_major"
    scales: KVScales = "none"
    shards: int = 1
    float8_as_bytes: bool = False

    def __post_init__(self) -> None:
        quantized = self.dtype in QUANTIZED_DTYPES
        if self.float8_as_bytes and not self.dtype.startswith("float8"):
            raise ValueError(f"a {self.dtype} KV pool holds no FP8 that could lie there as bytes")
        if quantized != (self.scales != "none"):
            needed = "needs scales ('token' or 'static')" if quantized else "takes no scales"
            raise ValueError(f"a {self.dtype} KV pool {needed}, not {self.scales!r}")

    @property
    def pages_dtype(self) -> jnp.dtype:
        """Of `KVPages.pages`."""
        return jnp.dtype("uint8" if self.float8_as_bytes else self.dtype)

    def pages_shape(self, num_pages: int) -> tuple[int, ...]:
        """Shape of `KVPages.pages` for a pool of `num_pages` pages."""
        if self.order == "token_major":
            return kv_orders_tpu.pages_shape(
                self.num_layers, num_pages, self.page_size, self.num_kv_heads, self.head_dim
            )
        return (self.num_layers, num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)

    def scales_shape(self, num_pages: int) -> tuple[int, ...] | None:
        """Shape of `KVPages.scales`; None for a pool without scales."""
        if self.scales == "none":
            return None
        if self.scales == "static":
            return (self.num_layers, 2, self.num_kv_heads)
        if self.order == "token_major":
            return kv_orders_tpu.token_scales_shape(
                self.num_layers, num_pages, self.page_size, self.num_kv_heads, self.shards
            )
        return (self.num_layers, num_pages, 2, self.num_kv_heads, self.page_size)

    @property
    def pages_head_axis(self) -> int:
        """The axis of `KVPages.pages` that tensor parallelism shards: KV heads lie along it, whole."""
        return 3

    @property
    def scales_head_axis(self) -> int:
        """The axis of `KVPages.scales` that tensor parallelism shards."""
        return 3 if self.scales == "token" and self.order == "head_major" else 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys, values and own scales in all layers of the group."""
        vectors = 2 * self.num_layers * self.num_kv_heads
        scale_bytes = 4 if self.scales == "token" else 0
        return vectors * (self.head_dim * jnp.dtype(self.dtype).itemsize + scale_bytes)

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes in all layers of the group, on all devices, scales per token included."""
        scales = self.scales_shape(1) if self.scales == "token" else None
        of_scales = 0 if scales is None else 4 * math.prod(scales)
        return math.prod(self.pages_shape(1)) * jnp.dtype(self.dtype).itemsize + of_scales


def read_pages(
    kv: KVPages, layer: Int[Array, ""], page_ids: Int[Array, "*N"], layout: KVLayout, dtype: jnp.dtype
) -> tuple[Float[Array, "*N K page D"], Float[Array, "*N K page D"]]:
    """Keys and values of some pages (ids within the pool) of one layer: as stored, or in `dtype` where scales apply."""
    stored = kv.pages.at[layer, page_ids].get(mode="promise_in_bounds")
    stored = jax.lax.bitcast_convert_type(stored, jnp.dtype(layout.dtype))
    if layout.order == "token_major":
        by_token = kv_orders_tpu.split(stored, layout.num_kv_heads, layout.head_dim)
        keys, values = (jnp.moveaxis(part, -2, -3) for part in by_token)
    else:
        keys, values = stored[..., 0, :, :, :], stored[..., 1, :, :, :]
    if kv.scales is None:
        return keys, values
    key_scales, value_scales = _read_scales(kv.scales, layer, page_ids, layout)
    return (
        (keys.astype(jnp.float32) * key_scales).astype(dtype),
        (values.astype(jnp.float32) * value_scales).astype(dtype),
    )


def _read_scales(
    scales: Array, layer: Int[Array, ""], page_ids: Int[Array, "*N"], layout: KVLayout
) -> tuple[Array, Array]:
    """Scales of keys and of values, shaped to multiply [*N, K, page, D]."""
    if layout.scales == "static":
        shape = (1,) * page_ids.ndim + (layout.num_kv_heads, 1, 1)
        return scales[layer, 0].reshape(shape), scales[layer, 1].reshape(shape)
    stored = scales.at[layer, page_ids].get(mode="promise_in_bounds")
    if layout.order == "token_major":
        parts = kv_orders_tpu.split_token_scales(
            stored, layout.page_size, layout.num_kv_heads, layout.dtype, layout.shards
        )
        keys, values = (jnp.moveaxis(part, -1, -2) for part in parts)
        return keys[..., None], values[..., None]
    return stored[..., 0, :, :, None], stored[..., 1, :, :, None]
