"""Quantized matmul: activations [T, in] by a weight [out, in] that is kept in 8 or 4 bits, on every backend.

    kind      activations                        products     accumulated in
    int8      int8, one scale per row, made here  int8 x int8  int32
    fp8_e4m3  e4m3, one scale per row, made here  e4m3 x e4m3  float32
    int4      bfloat16                            bfloat16     float32

Rows do not see each other, and int8 sums are exact: a row's int8 result is the same alone and in any batch, bit for bit.

Under `shard_map`: with weights sharded over `out`, results are sharded likewise. Sharded over `in`, each device quantizes its
part of the rows by itself and returns a part of the sum; ask for float32 and add the parts with `psum`.
"""

from __future__ import annotations

from typing import Literal, cast, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import check_traced_chip
from pallas_kernels.device_tables import current_device_kind
from pallas_kernels.operands import check_operands, in_stack
from pallas_kernels.quantized_matmul import cpu_native, mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.quantized_matmul.rotation import rotate
from pallas_kernels.quantized_matmul.tuning import blocks_for, tiles_for
from pallas_kernels.quantized_matmul.weights import Kind, QuantizedWeight, check_group, check_kind, layer_of

Backend = Literal["reference", "cpu_native", "mosaic_tpu", "mosaic_gpu"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
MAX_INT8_INPUTS = (2**31 - 1) // 127**2
"""More inputs could overflow the int32 sum of int8 products."""


def check_supported(backend: str, kind: str, *, out_features: int, in_features: int, group: int = 128) -> None:
    """Raises ValueError that names what `backend` cannot do for weights [out_features, in_features] of this kind.

    Called when an engine is built, with the sizes that one device holds. group: inputs per scale of int4, not used otherwise.
    """
    check_kind(kind)
    if backend not in BACKENDS:
        raise ValueError(f"matmul backend {backend!r} is unknown: it must be one of {', '.join(BACKENDS)}")
    if out_features < 1 or in_features < 1:
        raise ValueError(f"a quantized weight of {out_features} x {in_features} is empty")
    if kind == "int8" and in_features > MAX_INT8_INPUTS:
        raise ValueError(
            f"int8 weights of {in_features} inputs could overflow int32 sums: at most {MAX_INT8_INPUTS}; use fp8_e4m3 or int4"
        )
    if kind == "int4":
        check_group(in_features, group)
    if backend == "cpu_native" and kind != "int8":
        raise ValueError(f"matmul backend 'cpu_native' has int8 weights only, not {kind}: use 'reference'")
    if backend == "mosaic_tpu":
        mosaic_tpu.check_supported(cast(Kind, kind), out_features, in_features)
    if backend == "mosaic_gpu":
        check_traced_chip("quantized matmul")
        mosaic_gpu.check_supported(cast(Kind, kind), out_features, in_features)


def quantized_matmul(
    x: Float[Array, "T in"],
    weight: QuantizedWeight,
    *,
    layer: Int[Array, ""] | None = None,
    rows: Int[Array, ""] | None = None,
    packed: bool = False,
    out_dtype: jax.typing.DTypeLike | None = None,
    backend: Backend = "reference",
) -> Float[Array, "T out"]:
    """x times the transposed weight, in x's dtype, or in `out_dtype`.

    x: bfloat16 or float32. weight: [out, in], or a stack [L, out, in] of which `layer` picks one. A scan over layers should close
    over the stack and pass its index: kernels then read the layer where it lies, while a slice would be copied for them.
    rows: only the first `rows` are wanted, all if None. What others hold means nothing; `cpu_native` does not compute them.
    packed: the weight is what a PackedWeight holds, which `cpu_native` alone reads.

    Raises ValueError for shapes or dtypes that do not fit each other, and for what the backend cannot do.
    """
    check_operands(x, weight, layer, packed=packed, backend=backend)
    *_, out_features, in_features = weight.shape
    dtype = jnp.dtype(out_dtype or x.dtype)
    if backend == "cpu_native" and dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"matmul backend 'cpu_native' returns bfloat16 or float32, not {dtype}: use 'reference'")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"activations of dtype {x.dtype} are not supported: they must be bfloat16 or float32")
    check_supported(backend, weight.kind, out_features=out_features, in_features=in_features, group=weight.group)
    if backend == "reference":
        one = weight if layer is None else cast(QuantizedWeight, layer_of(weight, layer))
        return reference.matmul(rotate(x) if weight.rotated else x, one, dtype)
    weight, layer, rows = in_stack(x, weight, layer, rows)
    if backend == "cpu_native":
        return cpu_native.matmul(x, weight, layer, rows, dtype, packed=packed)
    if weight.rotated:
        x = rotate(x)
    device = current_device_kind()
    if backend == "mosaic_tpu":
        return mosaic_tpu.matmul(x, weight, layer, dtype, blocks=blocks_for(device, weight.kind))
    return mosaic_gpu.matmul(x, weight, layer, dtype, tiles=tiles_for(device, weight.kind, x.shape[0]))
