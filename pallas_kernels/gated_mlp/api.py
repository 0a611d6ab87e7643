"""The gated MLP of a layer: down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020), with weights of floats, int8 or FP8.

`reference` is three matmuls and what XLA makes of the rest. `cpu_native` is one call: gate and up meet in registers.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dense_matmul.api import BACKENDS, Backend
from pallas_kernels.gated_mlp import cpu_native, reference
from pallas_kernels.matmul import Weight
from pallas_kernels.packed_weight.weight import PackedWeight
from pallas_kernels.quantized_matmul.weights import QuantizedWeight


def gated_mlp(
    x: Float[Array, "T E"],
    gate_up: Weight,
    down: Weight,
    layer: Int[Array, ""],
    *,
    backend: Backend,
    rows: Int[Array, ""] | None = None,
) -> Float[Array, "T E"]:
    """The MLP of layer `layer`, in x's dtype. gate_up: [L, 2, F, E], the gate first. down: [L, E, F].

    rows: only the first `rows` are wanted, all if None. What others hold means nothing; `cpu_native` does not compute them.

    On `cpu_native` a row's result is the same alone and in any batch, bit for bit.
    Raises ValueError for shapes that do not fit each other, and for what the backend cannot do.
    """
    if backend not in BACKENDS:
        raise ValueError(f"MLP backend {backend!r} is unknown: it must be one of {', '.join(BACKENDS)}")
    L, two, F, E = gate_up.shape if len(gate_up.shape) == 4 else (0, 0, 0, 0)
    if two != 2 or down.shape != (L, E, F) or x.ndim != 2 or x.shape[1] != E:
        raise ValueError(
            f"x of shape {x.shape}, gate_up of {gate_up.shape} and down of {down.shape} do not fit each other: they must be "
            "[T, E], [L, 2, F, E] and [L, E, F]"
        )
    if isinstance(gate_up, PackedWeight) != isinstance(down, PackedWeight):
        raise ValueError("gate_up and down must both be packed, or neither")
    packed = isinstance(gate_up, PackedWeight)
    if packed and backend != "cpu_native":
        raise ValueError(f"packed weights can be read by MLP backend 'cpu_native' only, not by {backend!r}")
    first = gate_up.plain if isinstance(gate_up, PackedWeight) else gate_up
    last = down.plain if isinstance(down, PackedWeight) else down
    if isinstance(first, QuantizedWeight) != isinstance(last, QuantizedWeight):
        raise ValueError("gate_up and down must both be quantized, or neither")
    for weight in (first, last):
        if isinstance(weight, QuantizedWeight) and weight.kind == "int4":
            raise ValueError("a gated MLP has no int4 weights: quantize them to int8 or fp8_e4m3")
    if not F or not E:
        raise ValueError(f"gate_up of shape {gate_up.shape} is empty")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"activations of dtype {x.dtype} are not supported: they must be bfloat16 or float32")
    if backend == "cpu_native":
        cpu_native.check_supported(x.dtype, first, last)
        return cpu_native.mlp(x, first, last, layer, jnp.int32(x.shape[0]) if rows is None else rows, packed=packed)
    return reference.mlp(x, first, last, layer)
