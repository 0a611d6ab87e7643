"""KV write in plain XLA: a scatter, in place when the pool is donated or carried by a loop."""

from __future__ import annotations

import jax
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
    keys, values, new = stored(kv, layer, keys, values, layout=layout)
    scales = kv.scales
    if scales is not None and new is not None:
        scales = _scatter_scales(scales, layer, *new, pages, offsets, layout)
    return KVPages(_scatter(kv.pages, layer, keys, values, pages, offsets, layout), scales)


def stored(
    kv: KVPages, layer: Int[Array, ""], keys: Float[Array, "T K D"], values: Float[Array, "T K D"], *, layout: KVLayout
) -> tuple[Array, Array, tuple[Float[Array, "T K"], Float[Array, "T K"]] | None]:
    """Keys and values as the pool stores them, and their scales where each token has its own."""
    if kv.scales is None:
        return keys, values, None
    own = layout.scales == "token"
    if own:
        key_scales, value_scales = token_scales(keys, layout.dtype), token_scales(values, layout.dtype)
    else:
        static = kv.scales[layer]
        key_scales, value_scales = static[0][None, :], static[1][None, :]
    keys = quantize(keys, key_scales[..., None], layout.dtype)
    values = quantize(values, value_scales[..., None], layout.dtype)
    return keys, values, (key_scales, value_scales) if own else None


def _scatter(
    pool: Array, layer: Array, keys: Array, values: Array, pages: Array, offsets: Array, layout: KVLayout
) -> Array:
    keys, values = (jax.lax.bitcast_convert_type(x.astype(layout.dtype), pool.dtype) for x in (keys, values))
    if layout.order == "token_major":
        return kv_orders_tpu.write_rows(pool, layer, keys, values, pages, offsets)
    return pool.at[layer, pages, :, :, offsets].set(jnp.stack([keys, values], axis=1))


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
