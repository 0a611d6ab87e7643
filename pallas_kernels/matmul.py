"""Matmul by a weight of either kind: of floats, or quantized."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.dense_matmul.api import Backend, dense_matmul
from pallas_kernels.packed_weight.weight import PackedWeight
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.weights import QuantizedWeight

Plain = jax.Array | QuantizedWeight
Weight = Plain | PackedWeight


def matmul(
    x: Float[Array, "T in"],
    weight: Weight,
    layer: Int[Array, ""] | None = None,
    *,
    backend: Backend,
    rows: Int[Array, ""] | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "T out"]:
    """x by a weight [out, in], or by layer `layer` of [L, out, in]; in x's dtype, or in `out_dtype`. rows: see `dense_matmul`."""
    packed = isinstance(weight, PackedWeight)
    plain = weight.plain if isinstance(weight, PackedWeight) else weight
    if isinstance(plain, QuantizedWeight):
        return quantized_matmul(x, plain, layer=layer, rows=rows, packed=packed, out_dtype=out_dtype, backend=backend)
    return dense_matmul(x, plain, layer=layer, rows=rows, packed=packed, out_dtype=out_dtype, backend=backend)


def reshape_weight(weight: Weight, *shape: int) -> Weight:
    """A weight [..., in] in another shape with the same last dimension, or the same last dimensions taken together."""
    return (
        PackedWeight(_reshape(weight.plain, *shape)) if isinstance(weight, PackedWeight) else _reshape(weight, *shape)
    )


def _reshape(weight: Plain, *shape: int) -> Plain:
    if isinstance(weight, QuantizedWeight):
        values = weight.values.reshape(shape)
        return dataclasses.replace(weight, values=values, scales=weight.scales.reshape(values.shape[:-1]))
    return weight.reshape(shape)
