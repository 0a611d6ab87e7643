"""Rows of 8- and 16-bit numbers as TPU registers hold them: 4 or 2 neighbouring rows in each 32-bit word."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def row_bits(shape: tuple[int, ...], packing: int, first: Any, stop: Any) -> jax.Array:
    """int32 words of `shape` with all bits of rows [first, stop) set, `packing` rows to a word, and none of the others."""
    bits = 32 // packing
    row = lax.broadcasted_iota(jnp.int32, shape, 0) * packing
    mask = jnp.zeros(shape, jnp.int32)
    for i in range(packing):
        field = ((1 << bits) - 1) << (i * bits)
        signed = field - (1 << 32) if field >= 1 << 31 else field
        inside = (row + i >= first) & (row + i < stop)
        mask = mask | jnp.where(inside, jnp.int32(signed), jnp.int32(0))
    return mask
