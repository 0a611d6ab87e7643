"""The physical order of a KV page that the TPU kernels read: `token_major`.

A page is one matrix [page, K * 2 * D]: a row is a token, and along the row lie, head by head, its key and then its value.

- A page is one contiguous piece of memory, so that one copy without strides fetches keys and values of all heads.
- For D = 128 and 256, `K_h` and `V_h` are whole vector registers of (tokens, 128 lanes): the matrix unit takes them
  as they lie, without strided loads or shuffles.
- For D = 64, the key and the value of a head share the 128 lanes of one register: no byte is padding.
- Heads are contiguous, so that tensor parallelism shards the last axis.

Scales of a quantized pool that has one per token and head lie with tokens along the lanes, as they are applied to rows of
scores. For up to 128 tokens of a page, its scales are k_0, v_0, k_1, v_1, ... of so many tokens each, one after the other, in
rows of 128 lanes: a page of 16 tokens and 8 heads takes two rows. A copy moves whole rows, the last of which may have lanes to
spare: where a device holds fewer than 4 heads and pages are of 16 tokens (2 and 32). A page of 256 tokens has twice the rows of one of
128. In an FP8 pool, the tokens of a page (128 at most) lie with the even ones first and then the odd ones: the order in which
the kernels widen FP8.

Pure functions on arrays; the XLA reference reads and writes the same pool with them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

LANES = 128
SUBLANES = 8


def pages_shape(num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of the pool: [L, P, page, K * 2 * D]. Axis 3 is the one that tensor parallelism shards."""
    return (num_layers, num_pages, page_size, num_kv_heads * 2 * head_dim)


def scale_rows(page_size: int, num_kv_heads: int) -> int:
    """Rows of 128 lanes that the scales of up to 128 tokens of a page take on one device."""
    return -(-2 * num_kv_heads * min(page_size, LANES) // LANES)


def token_scales_shape(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, shards: int = 1
) -> tuple[int, ...]:
    """Shape of the float32 scales per token and head: [L, P, rows, 128]; axis 2 is the one that is sharded.

    shards: devices that the heads are split over; the rows of each are laid out by themselves. They fill whole tiles of memory
    (1, 2, 4 or 8 rows), the last ones unused: where they do not, XLA and the kernels see different layouts of one array, and
    the pool would be copied from one to the other in each layer.
    """
    rows = max(page_size // LANES, 1) * scale_rows(page_size, num_kv_heads // shards)
    tile = min(1 << (rows - 1).bit_length(), SUBLANES)
    return (num_layers, num_pages, shards * (-(-rows // tile) * tile), LANES)


def _scale_place(offsets: Int[Array, " N"], page_size: int, num_kv_heads: int, dtype: Any) -> Int[Array, "N 2*K"]:
    """Where among the scales of a page, counted lane by lane, those of the tokens at `offsets` of the page lie."""
    tokens = min(page_size, LANES)
    part, lane = offsets // tokens, offsets % tokens
    if jnp.dtype(dtype).name.startswith("float8"):
        lane = (lane % 2) * (tokens // 2) + lane // 2
    start = part * scale_rows(page_size, num_kv_heads) * LANES
    return (start + lane)[:, None] + (jnp.arange(2 * num_kv_heads) * tokens)[None]


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
    scales: Float[Array, "... rows lanes"], page_size: int, num_kv_heads: int, dtype: Any, shards: int = 1
) -> tuple[Float[Array, "... page K"], Float[Array, "... page K"]]:
    """Scales of keys and of values of whole pages."""
    heads = num_kv_heads // shards
    flat = scales.reshape(*scales.shape[:-2], shards, -1)
    found = flat[..., _scale_place(jnp.arange(page_size), page_size, heads, dtype)]
    found = jnp.moveaxis(found, -3, -2).reshape(*scales.shape[:-2], page_size, num_kv_heads, 2)
    return found[..., 0], found[..., 1]


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
    scales: Float[Array, "L P rows lanes"],
    layer: Int[Array, ""],
    key_scales: Float[Array, "T K"],
    value_scales: Float[Array, "T K"],
    page_ids: Int[Array, " T"],
    offsets: Int[Array, " T"],
    page_size: int,
    dtype: Any,
) -> Float[Array, "L P rows lanes"]:
    """The scales with those of the new tokens at (page_ids[t], offsets[t]), on one device; `dtype` is that of the pool.

    The scatter sees one axis, which is how the pool lies in memory: with more, XLA may choose an order of its own for it, and copy
    the pool into that and back in each layer.
    """
    T, K = key_scales.shape
    num_pages, rows, lanes = scales.shape[1:]
    new = jnp.stack([key_scales, value_scales], axis=-1).reshape(T, 2 * K)
    page_start = (layer * num_pages + page_ids) * (rows * lanes)
    place = page_start[:, None] + _scale_place(offsets, page_size, K, dtype)
    return scales.reshape(-1).at[place].set(new).reshape(scales.shape)
