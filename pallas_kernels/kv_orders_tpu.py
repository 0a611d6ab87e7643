"""The physical order of a KV page that the TPU kernels read: `token_major`.

A page is one matrix [page, K * 2 * D]: a row is a token, and along the row lie, head by head, its key and then its value.

- A page is one contiguous piece of memory, so that one copy without strides fetches keys and values of all heads.
- For D = 128 and 256, `K_h` and `V_h` are whole vector registers of (tokens, 128 lanes): the matrix unit takes them
  as they lie, without strided loads or shuffles.
- For D = 64, the key and the value of a head share the 128 lanes of one register: no byte is padding.
- Heads are contiguous, so that tensor parallelism shards the last axis.

Scales of a quantized pool that has one per token and head lie with tokens along the lanes, as they are applied to rows of
scores: a page holds the rows k_0, v_0, k_1, v_1, ... of `page` scales each, stored as rows of at least 128 lanes.

Pure functions on arrays; the XLA reference reads and writes the same pool with them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LANES = 128


def pages_shape(num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of the pool: [L, P, page, K * 2 * D]. Axis 3 is the one that tensor parallelism shards."""
    return (num_layers, num_pages, page_size, num_kv_heads * 2 * head_dim)


def token_scales_shape(num_layers: int, num_pages: int, page_size: int, num_kv_heads: int) -> tuple[int, ...]:
    """Shape of the float32 scales per token and head; axis 2 is the one that tensor parallelism shards.

    [L, P, 2 * K, page] where page is a multiple of 128; else the same numbers as rows of 128 lanes.
    """
    if page_size % LANES == 0:
        return (num_layers, num_pages, 2 * num_kv_heads, page_size)
    if LANES % page_size or (2 * num_kv_heads * page_size) % LANES:
        raise ValueError(
            f"scales per token and head need a page size that divides 128 or is a multiple of it, and whole rows of 128 "
            f"lanes: 2 * {num_kv_heads} KV heads * page size {page_size} does not give them; use a larger page"
        )
    return (num_layers, num_pages, 2 * num_kv_heads * page_size // LANES, LANES)


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
    scales: Float[Array, "... rows lanes"], num_kv_heads: int, page_size: int
) -> tuple[Float[Array, "... page K"], Float[Array, "... page K"]]:
    """Scales of keys and of values of whole pages."""
    heads = scales.reshape(*scales.shape[:-2], num_kv_heads, 2, page_size)
    return jnp.moveaxis(heads[..., 0, :], -1, -2), jnp.moveaxis(heads[..., 1, :], -1, -2)


def write_rows(
    pages: Float[Array, "L P page lanes"],
    layer: jax.Array,
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    page_ids: jax.Array,
    offsets: jax.Array,
) -> Float[Array, "L P page lanes"]:
    """The pool with the new tokens at (page_ids[t], offsets[t]); in place when the pool is donated."""
    return pages.at[layer, page_ids, offsets].set(join(keys, values).astype(pages.dtype))


def write_token_scales(
    scales: Float[Array, "L P rows lanes"],
    layer: jax.Array,
    key_scales: Float[Array, "T K"],
    value_scales: Float[Array, "T K"],
    page_ids: jax.Array,
    offsets: jax.Array,
    page_size: int,
) -> Float[Array, "L P rows lanes"]:
    """The scales with those of the new tokens at (page_ids[t], offsets[t])."""
    new = jnp.stack([key_scales, value_scales], axis=-1).reshape(key_scales.shape[0], -1)
    flat = jnp.arange(new.shape[1]) * page_size + offsets[:, None]
    lanes = scales.shape[-1]
    return scales.at[layer, page_ids[:, None], flat // lanes, flat % lanes].set(new)
