"""The largest magnitude of a row, which a NaN must not be lost in."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def peak_of_rows(x: Float[Array, "... N"]) -> Float[Array, ...]:
    """The largest magnitude of each row, in float32; NaN where the row has one.

    By their bits, whose order is that of the magnitudes, with infinity and then NaN above all: XLA's CPU backend loses NaN in a
    maximum of floats.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFF_FFFF
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)
