"""From keys and values to what a quantized pool stores, the same for every backend."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest magnitude that a stored number takes. Larger ones saturate: e4m3 has no infinity, and a NaN would spread."""


def token_scales(x: Float[Array, "T K D"], dtype: str) -> Float[Array, "T K"]:
    """A scale per token and head that uses the whole range: the largest magnitude over LARGEST; 1 for a row of zeros."""
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1)
    return jnp.where(largest == 0.0, 1.0, largest / LARGEST[dtype])


def quantize(x: Float[Array, "T K D"], scales: Float[Array, ...], dtype: str) -> Array:
    """x / scales, rounded to nearest and saturated, as `dtype`; scales broadcast against [T, K]."""
    limit = LARGEST[dtype]
    scaled = jnp.clip(x.astype(jnp.float32) / scales[..., None], -limit, limit)
    return (jnp.rint(scaled) if dtype == "int8" else scaled).astype(dtype)
