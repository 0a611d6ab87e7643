"""Numbers inside the TPU kernels: how stored keys and values become matmul operands, and what that does to scores.

FP8 is widened by moving bits: sign and magnitude are put where bfloat16 has them, without correcting the exponent's bias, so
that each register costs a handful of integer operations instead of a conversion to float32 and back. What is then off by
a constant power of two (2^-120 for e4m3, 2^-112 for e5m2) is made up for by scaling queries and probabilities, and the
result at the end. Subnormal FP8 numbers (below 2^-6 for e4m3, 2^-14 for e5m2, before the scale) count as zero on the chip.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LOG2E = 1.4426950408889634
MASKED = -1e30
"""The score of a key that is not seen."""
NOTHING = MASKED / 2
"""The running maximum before the first key: finite, so that a row without any stays free of NaN, and far above `MASKED`."""
_GAIN = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Numbers:
    """Of one storage dtype: `widened = stored * 2^-bias`; queries and probabilities carry 2^gain."""

    dtype: str
    bias: int = 0
    gain: int = 0

    @property
    def restore(self) -> float:
        """Times this, a product of (queries * 2^gain) and widened numbers is what it should be."""
        return 2.0 ** (self.bias - self.gain)

    @property
    def permuted(self) -> bool:
        """Whether `widen` changes the order of tokens: even ones first, then odd ones."""
        return self.dtype.startswith("float8")

    @property
    def precision(self) -> lax.Precision:
        return lax.Precision.HIGHEST if self.dtype == "float32" else lax.Precision.DEFAULT

    def widen(self, stored: jax.Array) -> jax.Array:
        """Stored numbers [tokens, lanes] as a matmul operand."""
        if self.dtype in ("float32", "bfloat16"):
            return stored
        if self.dtype == "int8":
            return stored.astype(jnp.bfloat16)
        words = pltpu.bitcast(stored, jnp.int32)
        shift = 4 if self.dtype == "float8_e4m3fn" else 5  # to the place of bfloat16's exponent and mantissa
        sign = jnp.int32(0x80008000 - (1 << 32))
        magnitude = jnp.int32(0x007F007F << shift)
        odd = (words & sign) | ((words >> (8 - shift)) & magnitude)
        even = ((words << 8) & sign) | ((words << shift) & magnitude)
        return jnp.concatenate([pltpu.bitcast(even, jnp.bfloat16), pltpu.bitcast(odd, jnp.bfloat16)], axis=0)

    def token_of_column(self, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Which token of the block each column of a score matrix stands for."""
        column = lax.broadcasted_iota(jnp.int32, shape, axis)
        if not self.permuted:
            return column
        half = shape[axis] // 2
        is_odd = column >= half
        return jnp.where(is_odd, 2 * (column - half) + 1, 2 * column)


@dataclasses.dataclass(frozen=True, slots=True)
class HeadConstants:
    """float32 constants per head that turn raw products into the softmax of the contract, in units of log2.

    key_factor, value_factor: [K]. start_top, start_total: [K, G], the running maximum and sum before the first key: those of
    a sink, or of nothing.
    """

    key_factor: jax.Array
    value_factor: jax.Array
    start_top: jax.Array
    start_total: jax.Array


def numbers_of(dtype: Any) -> Numbers:
    name = jnp.dtype(dtype).name
    bias = {"float8_e4m3fn": 120, "float8_e5m2": 112}.get(name, 0)
    return Numbers(name, bias, _GAIN if bias else 0)


def dot(a: jax.Array, b: jax.Array, contract_b: int, precision: lax.Precision) -> jax.Array:
    """a [rows, c] times b, contracted over b's axis `contract_b`; operands may differ in dtype, the result is float32."""
    dims = (((1,), (contract_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def across(x: jax.Array, width: int) -> jax.Array:
    """x [rows, 128], the same number in all lanes, as [rows, width]: registers are reused, no lane moves."""
    lanes = x.shape[1]
    return x if width == lanes else jnp.concatenate([x] * (width // lanes), axis=1)
