"""Quantized matmul in plain XLA: the oracle of the kernels, and the path of the engine wherever native CPU code does not serve.

On a CPU an int8 x int8 -> int32 product of two matrices, both contracted on their last axis, reads the weights as bytes and
makes no wider copy of them. It is faster than bfloat16 from 8 to 512 rows (`benchmarks/matmul_cpu.py`): narrow and wide
steps take one path. Fewer rows are padded. A scan over stacked layers copies a layer's slice first; layers as separate arrays were
no faster, and compile several times longer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.quantized_matmul.activations import quantize_rows
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, dequantize

MIN_ROWS = 8
"""With fewer rows XLA's CPU backend takes a path that is ten times slower."""

_LAST_AXES = (((1,), (1,)), ((), ()))


def matmul(x: Float[Array, "T in"], weight: QuantizedWeight, out_dtype: jnp.dtype) -> Float[Array, "T out"]:
    """Contract: `pallas_kernels.quantized_matmul.api`; the weight is one layer's."""
    T = x.shape[0]
    x = jnp.pad(x, ((0, max(MIN_ROWS - T, 0)), (0, 0)))
    if weight.kind == "int4":
        product = _dot(x.astype(jnp.bfloat16), dequantize(weight, jnp.bfloat16), jnp.float32)
    else:
        values, row_scales = quantize_rows(x, weight.kind)
        if weight.kind == "int8":
            product = _dot(values, weight.values, jnp.int32).astype(jnp.float32)
        else:  # bfloat16 holds every e4m3 value, and its products are exact in float32
            product = _dot(values.astype(jnp.bfloat16), weight.values.astype(jnp.bfloat16), jnp.float32)
        product = product * row_scales[:, None] * weight.scales[None, :]
    return product[:T].astype(out_dtype)


def _dot(a: Array, b: Array, accumulate: jax.typing.DTypeLike) -> Array:
    return jax.lax.dot_general(a, b, _LAST_AXES, preferred_element_type=accumulate)
