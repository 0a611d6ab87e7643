"""Keys and values as stored numbers: elementwise, so that XLA fuses it with what makes the keys and values.

stored * scale = value. Numbers beyond the range of the dtype saturate. FP8 numbers are stored as normal numbers or zero: a
magnitude below the smallest normal one is rounded to the nearer of the two, as the TPU kernels read subnormals as zero.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.peak import peak_of_rows

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32."""
_SMALLEST_NORMAL = {"int8": 0.0, "float8_e4m3fn": 2.0**-6, "float8_e5m2": 2.0**-14}


def largest(dtype: Any) -> float:
    """The largest number that a pool of `dtype` stores."""
    return LARGEST[jnp.dtype(dtype).name]


def quantize(x: Float[Array, "T K D"], scale: Float[Array, "... one"], dtype: Any) -> Float[Array, "T K D"]:
    """x / scale as numbers of `dtype`; `scale` is [K, 1] or [T, K, 1]."""
    return saturate(x.astype(jnp.float32) / jnp.broadcast_to(scale, (*x.shape[:2], 1)), dtype)


def saturate(scaled: Float[Array, "*N"], dtype: Any) -> Float[Array, "*N"]:
    """float32 numbers in `dtype`, as a pool of that dtype stores them."""
    kind = jnp.dtype(dtype)
    top = largest(kind)
    scaled = jnp.clip(scaled, -top, top)
    if kind == jnp.int8:
        return jnp.round(scaled).astype(kind)
    smallest = _SMALLEST_NORMAL[kind.name]
    tiny = jnp.where(jnp.abs(scaled) < smallest / 2, 0.0, jnp.where(scaled < 0, -smallest, smallest))
    return jnp.where(jnp.abs(scaled) < smallest, tiny, scaled).astype(kind)


def token_scales(x: Float[Array, "T K D"], dtype: Any) -> Float[Array, "T K"]:
    """Scales that map the largest number of each token and head to the largest of `dtype`; 1 where all are zero."""
    return scale_of_peak(peak_of_rows(x), dtype)


def scale_of_peak(peak: Float[Array, "*N"], dtype: Any) -> Float[Array, "*N"]:
    """The scale of rows whose largest magnitudes are `peak`. A product, as some compilers make one of a division by a constant.

    Never subnormal: hardware may read such a number as zero, and a row divided by zero is NaN.
    """
    scale = jnp.maximum(peak * (1.0 / largest(dtype)), _SMALLEST_SCALE)
    return jnp.where(peak == 0.0, jnp.ones_like(peak), scale)
