"""Matmul with float weights on CPU: native code through XLA's FFI that reads a layer's weights where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.native import library


def check_supported(x_dtype: jnp.dtype, weight_dtype: jnp.dtype, out_dtype: jnp.dtype, in_features: int) -> None:
    """Raises ValueError that names what cannot be multiplied."""
    floats = (jnp.bfloat16, jnp.float32)
    if x_dtype != weight_dtype or x_dtype not in floats or out_dtype not in floats:
        raise ValueError(
            f"matmul backend 'cpu_native' multiplies bfloat16 by bfloat16 or float32 by float32, not {x_dtype} by {weight_dtype}, "
            f"and returns one of them, not {out_dtype}: use 'reference'"
        )
    if x_dtype == jnp.bfloat16 and in_features % 2:
        raise ValueError(
            f"matmul backend 'cpu_native' multiplies pairs of bfloat16, so {in_features} inputs are not possible: use 'reference'"
        )


def matmul(
    x: Float[Array, "T in"],
    stack: Float[Array, "L out in"],
    layer: Int[Array, ""],
    rows: Int[Array, ""],
    out_dtype: jnp.dtype,
    *,
    packed: bool,
) -> Float[Array, "T out"]:
    """Contract: `pallas_kernels.dense_matmul.api`. Raises NativeBuildError while tracing."""
    library.load()
    call = jax.ffi.ffi_call("jaxkv_dense_matmul", jax.ShapeDtypeStruct((x.shape[0], stack.shape[1]), out_dtype))
    return call(x, stack, layer, rows, packed=packed)
