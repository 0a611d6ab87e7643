"""Matmul of activations [T, in] by a weight [out, in] of floats, which may be one layer of a stack.

`reference` is XLA's own matmul, the best there is on TPU and GPU. On a CPU XLA copies a layer out of its stack first, and is not
fast for few rows: `cpu_native` reads the layer where it lies.
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dense_matmul import cpu_native, reference
from pallas_kernels.operands import check_operands, in_stack

Backend = Literal["reference", "cpu_native"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


def dense_matmul(
    x: Float[Array, "T in"],
    weight: Float[Array, "*L out in"],
    *,
    layer: Int[Array, ""] | None = None,
    rows: Int[Array, ""] | None = None,
    packed: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: Backend = "reference",
) -> Float[Array, "T out"]:
    """x times the transposed weight, added up in float32, in x's dtype or in `out_dtype`.

    weight: [out, in], or a stack [L, out, in] of which `layer`, in [0, L), picks one.
    rows: only the first `rows` are wanted, all if None. What others hold means nothing; `cpu_native` does not compute them.
    packed: the weight is what a PackedWeight holds, which `cpu_native` alone reads.

    On `cpu_native` both are float32 or both bfloat16, and a row's result is the same alone and in any batch, bit for bit.
    Raises ValueError for shapes that do not fit each other, and for what the backend cannot do.
    """
    if backend not in BACKENDS:
        raise ValueError(f"matmul backend {backend!r} is unknown: it must be one of {', '.join(BACKENDS)}")
    check_operands(x, weight, layer, packed=packed, backend=backend)
    dtype = jnp.dtype(out_dtype or x.dtype)
    if backend == "reference":
        one = weight if layer is None else jax.lax.dynamic_index_in_dim(weight, layer, keepdims=False)
        return reference.matmul(x, one, dtype)
    cpu_native.check_supported(x.dtype, weight.dtype, dtype, x.shape[1])
    stack, layer, rows = in_stack(x, weight, layer, rows)
    return cpu_native.matmul(x, stack, layer, rows, dtype, packed=packed)
