"""Activations quantized row by row at run time, the same for every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.peak import peak_of_rows
from pallas_kernels.quantized_matmul.weights import LARGEST, Kind

DTYPES: dict[Kind, jax.typing.DTypeLike] = {"int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn}
_SMALLEST = 2.0**-118
"""Rows whose largest magnitude is below this count as zero: the inverse of their scale would not be a finite number."""


def quantize_rows(x: Float[Array, "T in"], kind: Kind) -> tuple[Array, Float[Array, " T"]]:
    """(values [T, in] in the kind's 8-bit dtype, float32 scales [T]) with x = values * scale, to rounding.

    The largest magnitude of a row becomes 127 or 448. NaN or infinity in a row makes its scale the
    same, and so shows in the result.
    """
    largest = LARGEST[kind]
    wide = x.astype(jnp.float32)
    top = peak_of_rows(wide)
    inverse = jnp.where(top < _SMALLEST, 0.0, largest / top)
    steps = wide * inverse[:, None]
    # e4m3 has no infinity: one rounding error above the largest value must not become NaN.
    steps = jnp.round(steps) if kind == "int8" else jnp.clip(steps, -largest, largest)
    return steps.astype(DTYPES[kind]), top / largest


def even_then_odd(x: Float[Array, "T in"], group: int) -> Float[Array, "T in"]:
    """The inputs of each int4 group in the order in which unpacked bytes give them: first all low halves, then all high ones."""
    T, width = x.shape
    return x.reshape(T, width // group, group // 2, 2).swapaxes(2, 3).reshape(T, width)
