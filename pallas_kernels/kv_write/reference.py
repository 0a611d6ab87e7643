"""KV write in plain XLA: a scatter, in place when the pool is donated or carried by a loop."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import kv_orders_tpu
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write.quantize import quantize, token_scales


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
    """Contract: `pallas_kernels.kv_write.api`."""
    keys, values, scales = stored(kv, layer, keys, values, pages, offsets, layout=layout)
    return KVPages(_scatter(kv.pages, layer, keys, values, pages, offsets, layout), scales)


def stored(
    kv: KVPages,
    layer: Int[Array, ""],
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    *,
    layout: KVLayout,
) -> tuple[Array, Array, Array | None]:
    """Keys and values as the pool stores them, and the pool's scales with those of the new tokens."""
    if kv.scales is None:
        return keys, values, None
    if layout.scales == "static":
        static = kv.scales[layer]
        key_scales, value_scales = static[0][None, :], static[1][None, :]
        scales = kv.scales
    else:
        key_scales, value_scales = token_scales(keys, layout.dtype), token_scales(values, layout.dtype)
        scales = _scatter_scales(kv.scales, layer, key_scales, value_scales, pages, offsets, layout)
    keys = quantize(keys, key_scales[..., None], layout.dtype)
    values = quantize(values, value_scales[..., None], layout.dtype)
    return keys, values, scales


def _scatter(
    pool: Array, layer: Array, keys: Array, values: Array, pages: Array, offsets: Array, layout: KVLayout
) -> Array:
    if layout.order == "token_major":
        return kv_orders_tpu.write_rows(pool, layer, keys, values, pages, offsets)
    rows = jnp.stack([keys, values], axis=1).astype(pool.dtype)
    return pool.at[layer, pages, :, :, offsets].set(rows)


def _scatter_scales(
    scales: Array,
    layer: Array,
    key_scales: Float[Array, "T K"],
    value_scales: Float[Array, "T K"],
    pages: Array,
    offsets: Array,
    layout: KVLayout,
) -> Array:
    if layout.order == "token_major":
        return kv_orders_tpu.write_token_scales(
            scales, layer, key_scales, value_scales, pages, offsets, layout.page_size, layout.dtype
        )
    return scales.at[layer, pages, :, :, offsets].set(jnp.stack([key_scales, value_scales], axis=1))
