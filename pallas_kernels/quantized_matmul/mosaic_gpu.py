"""Quantized matmul on Hopper: TMA brings tiles of activations and weights, `wgmma` multiplies them, int4 is widened in between.

One warpgroup copies; each of the others owns 64 tokens. Products of one tile of inputs are added to float32 (int8: int32) sums in
registers: for FP8 that is what makes the accumulation float32, as Hopper's own FP8 accumulator keeps only about 14 bits. int4: the
copying warpgroup also unpacks a tile, a group of inputs, to bfloat16 integers 0..15; the group's scale and zero point are applied
to its products. Steps with few tiles split the inputs over blocks, so that all of the chip reads weights; XLA adds the parts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper.memory import Ref, tiled
from pallas_kernels.hopper.warpgroups import ROWS, in_roles
from pallas_kernels.quantized_matmul.activations import even_then_odd, quantize_rows
from pallas_kernels.quantized_matmul.mosaic_gpu_call import MIN_INPUTS, MIN_OUTPUTS, WIDENED, Call, Kernel, make_kernel
from pallas_kernels.quantized_matmul.mosaic_gpu_consume import consume
from pallas_kernels.quantized_matmul.mosaic_gpu_produce import produce, produce_widened
from pallas_kernels.quantized_matmul.tuning import Tiles
from pallas_kernels.quantized_matmul.weights import Kind, QuantizedWeight

KERNEL_NAME = "quantized_matmul"


def matmul(
    x: Float[Array, "T in"], weight: QuantizedWeight, layer: Int[Array, ""], out_dtype: jnp.dtype, *, tiles: Tiles
) -> Float[Array, "T out"]:
    """Contract: `pallas_kernels.quantized_matmul.api`; the weight is a stack [L, out, in]."""
    T = x.shape[0]
    x = jnp.pad(x, ((0, -T % (ROWS * tiles.warpgroups)), (0, 0)))
    kernel = make_kernel(weight, tiles, x.shape[0])
    layer = layer.reshape(1)
    if kernel.is_int4:
        rows = x.astype(jnp.bfloat16)
        sums = rows.astype(jnp.float32).reshape(x.shape[0], -1, weight.group).sum(axis=2).T
        operands = [even_then_odd(rows, weight.group), weight.values, sums, weight.scales, weight.zero_points]
    else:
        values, row_scales = quantize_rows(x, weight.kind)
        operands = [values, weight.values, row_scales, weight.scales]
    parts = _call(kernel, operands, layer, out_dtype)
    if kernel.splits == 1:
        return parts[0, :T]
    total = parts.sum(axis=0).astype(jnp.float32)
    if not kernel.is_int4:
        total = total * row_scales[:, None] * lax.dynamic_index_in_dim(weight.scales, layer[0], keepdims=True)
    return total[:T].astype(out_dtype)


def check_supported(kind: Kind, out_features: int, in_features: int) -> None:
    """Raises ValueError for numbers of outputs and inputs that cannot be cut into tiles."""
    for name, size, unit in (("outputs", out_features, MIN_OUTPUTS), ("inputs", in_features, MIN_INPUTS)):
        if size % unit:
            raise ValueError(
                f"matmul backend 'mosaic_gpu' cuts {kind} weights into tiles of {unit} {name}: {size} must be a multiple"
            )


def _call(kernel: Kernel, operands: list[Any], layer: Array, out_dtype: jnp.dtype) -> Float[Array, "splits T out"]:
    """The result if there is one split. Else the sums of each: of int8 in int32 and not scaled, so that their total is exact."""

    def body(x: Ref, w: Ref, of_rows: Ref, scales: Ref, /, *refs: Ref, **scratch: Ref) -> None:
        *zeros, layer, result = refs
        call = Call(kernel, x, w, of_rows, scales, zeros[0] if zeros else None, layer, result, scratch)
        part, wg = call.part(), lax.axis_index("wg")
        in_roles(
            wg,
            kernel.tiles.registers,
            lambda: consume(call, part, wg),
            lambda: produce_widened(call, part) if kernel.is_int4 else produce(call, part),
            consumers=kernel.tiles.warpgroups,
        )

    shape = (kernel.splits, kernel.rows, kernel.out)
    return plgpu.kernel(  # type: ignore[no-any-return]
        body,
        out_type=jax.ShapeDtypeStruct(shape, out_dtype if kernel.splits == 1 else kernel.accumulate),
        grid=(kernel.splits, kernel.out // kernel.outputs, kernel.rows // kernel.tokens),
        grid_names=("split", "out", "token"),
        num_threads=kernel.tiles.warpgroups + 1,
        thread_name="wg",
        kernel_name=f"{KERNEL_NAME}_{kernel.kind}",
        scratch_types=_scratch(kernel, operands[0].dtype, operands[1].dtype),
    )(*operands, layer)


def _scratch(kernel: Kernel, multiplied: Any, stored: Any) -> dict[str, Any]:
    """Shared memory and barriers of one block. Dtypes: of activations, and of the weight in memory."""
    stages, consumers, inputs = kernel.tiles.stages, kernel.tiles.warpgroups, kernel.inputs
    # Rows of bytes are 128 wide; int4 is unpacked half a group at a time.
    columns = inputs // 2 if kernel.is_int4 else min(128, inputs)
    scratch = {
        "x": tiled((stages, kernel.tokens, inputs), multiplied, columns),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
    }
    if not kernel.is_int4:
        return scratch | {"w": tiled((stages, kernel.outputs, inputs), stored, columns)}
    return scratch | {
        "w": plgpu.SMEM((stages, kernel.outputs, inputs // 2), stored),
        "wide": tiled((WIDENED, kernel.outputs, inputs), multiplied, columns),
        "wide_full": plgpu.Barrier(num_barriers=WIDENED),
        "wide_free": plgpu.Barrier(num_arrivals=consumers, num_barriers=WIDENED),
    }
