"""Matmul by a weight of any kind: of floats, quantized, or packed."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.dense_matmul.api import Backend, dense_matmul
from pallas_kernels.packed_weight.weight import PackedWeight
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.weights import Plain, QuantizedWeight, layer_of

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
    """x by a weight [*out, *in], or by layer `layer` of [L, *out, *in]; in x's dtype, or in `out_dtype`.

    The weight's last dimensions that together are x's width are its inputs, and those before them its outputs; of a packed weight
    there is one of each. rows: see `dense_matmul`.
    """
    packed = isinstance(weight, PackedWeight)
    plain = weight.plain if isinstance(weight, PackedWeight) else weight
    if backend == "reference" and layer is not None and not packed:
        # Cut out before it is made flat: on a TPU, whose arrays are tiled, the other order copies all layers.
        plain, layer = layer_of(plain, layer), None
    lead = () if layer is None else plain.shape[:1]
    flat = plain if packed else _flatten(plain, (*lead, -1, x.shape[1]))
    if isinstance(flat, QuantizedWeight):
        return quantized_matmul(x, flat, layer=layer, rows=rows, packed=packed, out_dtype=out_dtype, backend=backend)
    return dense_matmul(x, flat, layer=layer, rows=rows, packed=packed, out_dtype=out_dtype, backend=backend)


def _flatten(weight: Plain, shape: tuple[int, ...]) -> Plain:
    if not isinstance(weight, QuantizedWeight):
        return weight.reshape(shape)
    if len(weight.shape) == len(shape):
        return weight
    if weight.kind == "int4":
        raise ValueError(f"an int4 weight of shape {weight.shape} must be [out, in], or [L, out, in] with `layer`")
    values = weight.values.reshape(shape)
    return dataclasses.replace(weight, values=values, scales=weight.scales.reshape(values.shape[:-1]))
