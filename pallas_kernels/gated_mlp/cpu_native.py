"""The gated MLP on CPU: one call of native code through XLA's FFI, which reads a layer's weights where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dense_matmul import cpu_native as dense
from pallas_kernels.native import library
from pallas_kernels.quantized_matmul import api as quantized
from pallas_kernels.quantized_matmul.weights import Plain, QuantizedWeight


def check_supported(dtype: jnp.dtype, gate_up: Plain, down: Plain) -> None:
    """Raises ValueError that names what the native code cannot do. dtype: of the activations."""
    for weight in (gate_up, down):
        *_, out_features, in_features = weight.shape
        if isinstance(weight, QuantizedWeight):
            quantized.check_supported("cpu_native", weight.kind, out_features=out_features, in_features=in_features)
        else:
            dense.check_supported(dtype, weight.dtype, dtype, in_features)
    if isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight) and gate_up.rotated != down.rotated:
        raise ValueError("gate_up and down must both be rotated, or neither, for 'cpu_native': use 'reference'")


def mlp(
    x: Float[Array, "T E"], gate_up: Plain, down: Plain, layer: Int[Array, ""], rows: Int[Array, ""], *, packed: bool
) -> Float[Array, "T E"]:
    """Contract: `pallas_kernels.gated_mlp.api`. Raises NativeBuildError while tracing."""
    library.load()
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    where = (jnp.asarray(layer, jnp.int32), jnp.asarray(rows, jnp.int32))
    if isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight):
        call = jax.ffi.ffi_call("jaxkv_gated_mlp_int8", result)
        weights = (gate_up.values, gate_up.scales, down.values, down.scales)
        return call(x, *weights, *where, rotated=gate_up.rotated, packed=packed)
    return jax.ffi.ffi_call("jaxkv_gated_mlp", result)(x, gate_up, down, *where, packed=packed)
