"""int8 matmul on CPU: native code through XLA's FFI that reads a layer's weights where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.native import library
from pallas_kernels.quantized_matmul.weights import QuantizedWeight


def matmul(
    x: Float[Array, "T in"],
    stack: QuantizedWeight,
    layer: Int[Array, ""],
    rows: Int[Array, ""],
    out_dtype: jnp.dtype,
    *,
    packed: bool,
) -> Float[Array, "T out"]:
    """Contract: `pallas_kernels.quantized_matmul.api`; activations are rotated here. Raises NativeBuildError while tracing."""
    library.load()
    result = jax.ShapeDtypeStruct((x.shape[0], stack.shape[1]), out_dtype)
    call = jax.ffi.ffi_call("jaxkv_int8_matmul", result)
    return call(x, stack.values, stack.scales, layer, rows, rotated=stack.rotated, packed=packed)
