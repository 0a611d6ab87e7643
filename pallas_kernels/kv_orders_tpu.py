"""The physical order of a KV page that the TPU kernels read: `token_major`.

A page is one matrix [page, K * 2 * D]: a row is a token, and along the row lie, head by head, its key and then its value.

- A page is one contiguous piece of memory, so that one copy without strides fetches keys and values of all heads.
- For D = 128 and 256, `K_h` and `V_h` are whole vector registers of (tokens, 128 lanes): the matrix unit takes them
  as they lie, without strided loads or shuffles.
- For D = 64, the key and the value of a head share the 128 lanes of one register: no byte is padding.
- Heads are contiguous, so that tensor parallelism shards the last axis.

Scales of a quantized pool that has one per token and head lie with tokens along the lanes, as they are applied to rows of
scores: a page holds the rows k_0, v_0, k_1, v_1, ... of `page` scales each. In an FP8 pool, every 128 tokens of a row lie with
the even ones first and then the odd ones: the order in which the kernels widen FP8.

Pure functions on arrays; the XLA reference reads and writes the same pool with them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES = 128


def pages_shape(num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of the pool: [L, P, page, K * 2 * D]. Axis 3 is the one that tensor parallelism shards."""
    return (num_layers, num_pages, page_size, num_kv_heads * 2 * head_dim)


def token_scales_shape(num_layers: int, num_pages: int, page_size: int, num_kv_heads: int) -> tuple[int, ...]:
    """Shape of the float32 scales per token and head: [L, P, 2 * K, page]; axis 2 is the one that is sharded."""
    if page_size % LANES:
        raise ValueError(
            f"scales per token and head need a page size that is a multiple of {LANES}, not {page_size}: "
            "use larger pages, or scales per layer and head"
        )
    return (num_layers, num_pages, 2 * num_kv_heads, page_size)


def scale_lane(offsets: Int[Array, " N"], dtype: Any) -> Int[Array, " N"]:
    """Where in a row of a page's scales the token at `offsets` of the page lies."""
    if not jnp.dtype(dtype).name.startswith("float8"):
        return offsets
    within = offsets % LANES
    return offsets - within + (within % 2) * (LANES // 2) + within // 2


def join(keys: Float[Array, "... K D"], values: Float[Array, "... K D"]) -> Float[Array, "... K*2*D"]:
    """Rows of a page from keys and values."""
    rows = jnp.stack([keys, values], axis=-2)
    return rows.reshape(*keys.shape[:-2], -1)


def split(
    rows: Float[Array, "... K*2*D"], num_kv_heads: int, head_dim: int
) -> tuple[Float[Array, "... K D"], Float[Array, "... K D"]]:
    """Keys and values of rows of a page."""
    heads = rows.reshape(*rows.shape[:-1], num_kv_heads, 2, head_dim)
    return heads[..., 0, :], heads[..., 1, :]


def split_token_scales(
    scales: Float[Array, "... rows page"], num_kv_heads: int, dtype: Any
) -> tuple[Float[Array, "... page K"], Float[Array, "... page K"]]:
    """Scales of keys and of values of whole pages."""
    in_order = scales[..., scale_lane(jnp.arange(scales.shape[-1]), dtype)]
    heads = in_order.reshape(*scales.shape[:-2], num_kv_heads, 2, scales.shape[-1])
    return jnp.moveaxis(heads[..., 0, :], -1, -2), jnp.moveaxis(heads[..., 1, :], -1, -2)


def write_rows(
    pages: Float[Array, "L P page lanes"],
    layer: Int[Array, ""],
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    page_ids: Int[Array, " T"],
    offsets: Int[Array, " T"],
) -> Float[Array, "L P page lanes"]:
    """The pool with the new tokens at (page_ids[t], offsets[t]); in place when the pool is donated."""
    return pages.at[layer, page_ids, offsets].set(join(keys, values).astype(pages.dtype))


def write_token_scales(
    scales: Float[Array, "L P rows page"],
    layer: Int[Array, ""],
    key_scales: Float[Array, "T K"],
    value_scales: Float[Array, "T K"],
    page_ids: Int[Array, " T"],
    offsets: Int[Array, " T"],
    dtype: Any,
) -> Float[Array, "L P rows page"]:
    """The scales with those of the new tokens at (page_ids[t], offsets[t]); `dtype` is that of the pool."""
    new = jnp.stack([key_scales, value_scales], axis=-1).reshape(key_scales.shape[0], -1)
    return scales.at[layer, page_ids, :, scale_lane(offsets, dtype)].set(new)
