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
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_gpu_store import store
from pallas_kernels.quantized_matmul.activations import even_then_odd, quantize_rows
from pallas_kernels.quantized_matmul.tuning import Tiles
from pallas_kernels.quantized_matmul.weights import Kind, QuantizedWeight

KERNEL_NAME = "quantized_matmul"
ROWS = 64
"""Tokens of one warpgroup."""
_MIN_OUTPUTS, _MIN_INPUTS = 16, 64
_MIN_STEPS = 8
"""A split of the inputs is worth at least so many tiles."""
_WIDENED = 2
"""Unpacked int4 tiles in flight."""
WGMMA = plgpu.Layout.WGMMA


def matmul(
    x: Float[Array, "T in"], weight: QuantizedWeight, layer: Int[Array, ""], out_dtype: jnp.dtype, *, tiles: Tiles
) -> Float[Array, "T out"]:
    """Contract: `pallas_kernels.quantized_matmul.api`; the weight is a stack [L, out, in]."""
    T = x.shape[0]
    x = jnp.pad(x, ((0, -T % (ROWS * tiles.warpgroups)), (0, 0)))
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    if weight.kind == "int4":
        rows = x.astype(jnp.bfloat16)
        sums = rows.astype(jnp.float32).reshape(x.shape[0], -1, weight.group).sum(axis=2).T
        operands = [even_then_odd(rows, weight.group), weight.values, sums, weight.scales, weight.zero_points]
    else:
        values, row_scales = quantize_rows(x, weight.kind)
        operands = [values, weight.values, row_scales, weight.scales]
    parts = _call(weight, tiles, layer, operands, out_dtype)
    if parts.shape[0] == 1:
        return parts[0, :T]
    total = parts.sum(axis=0).astype(jnp.float32)
    if weight.kind != "int4":
        total = total * row_scales[:, None] * lax.dynamic_index_in_dim(weight.scales, layer[0], keepdims=True)
    return total[:T].astype(out_dtype)


def check_supported(kind: Kind, out_features: int, in_features: int) -> None:
    """Raises ValueError for numbers of outputs and inputs that cannot be cut into tiles."""
    for name, size, unit in (("outputs", out_features, _MIN_OUTPUTS), ("inputs", in_features, _MIN_INPUTS)):
        if size % unit:
            raise ValueError(
                f"matmul backend 'mosaic_gpu' cuts {kind} weights into tiles of {unit} {name}: {size} must be a multiple"
            )


def _divisor(size: int, largest: int, smallest: int) -> int:
    """The largest of largest, largest/2, ... that divides `size`; `smallest` does."""
    tile = largest
    while tile > smallest and size % tile:
        tile //= 2
    return tile


def _tiled(shape: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    tiling: Any = plgpu.TilingTransform  # abstract to type checkers, whose base class leaves a method empty
    swizzling: Any = plgpu.SwizzleTransform
    transforms = (tiling((8, swizzle // jnp.dtype(dtype).itemsize)), swizzling(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _call(
    weight: QuantizedWeight, tiles: Tiles, layer: Array, operands: list[Any], out_dtype: jnp.dtype
) -> Float[Array, "splits T out"]:
    """The result if there is one split. Else the sums of each: of int8 in int32 and not scaled, so that their total is exact."""
    _, out, width = weight.shape
    tokens = ROWS * tiles.warpgroups
    is_int4 = weight.kind == "int4"
    outputs = _divisor(out, tiles.outputs, _MIN_OUTPUTS)
    inputs = weight.group if is_int4 else _divisor(width, tiles.inputs, _MIN_INPUTS)
    steps = width // inputs
    padded = operands[0].shape[0]
    blocks = (padded // tokens) * (out // outputs)
    splits = max(1, min(tiles.blocks // blocks, steps // _MIN_STEPS))
    stages = tiles.stages
    accumulate = jnp.int32 if weight.kind == "int8" else jnp.float32
    swizzle = min(128, inputs)  # of a row of `inputs` bytes; int4: of half a group in bfloat16

    def body(x: Any, w: Any, *refs: Any) -> None:
        if is_int4:
            sums, scales, zeros, layer_ref, result, x_smem, w_smem, wide_smem, full, consumed, ready, used = refs
        else:
            row_scales, scales, layer_ref, result, x_smem, w_smem, full, consumed = refs
        split, at_out, at_token = (lax.axis_index(name) for name in ("split", "out", "token"))
        layer = layer_ref[0]
        first = lax.div(split * steps, jnp.int32(splits))
        count = lax.div((split + 1) * steps, jnp.int32(splits)) - first
        out0 = pl.multiple_of(at_out * outputs, outputs)
        columns = pl.ds(out0, outputs)

        @pl.when(lax.axis_index("wg") == tiles.warpgroups)
        def _copy() -> None:
            def fetch(i: Array) -> None:
                slot, step = lax.rem(i, jnp.int32(stages)), first + i
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(consumed.at[slot]))
                rows = pl.ds(pl.multiple_of(at_token * tokens, tokens), tokens)
                columns_x = pl.ds(pl.multiple_of(step * inputs, inputs), inputs)
                plgpu.copy_gmem_to_smem(x.at[rows, columns_x], x_smem.at[slot], full.at[slot])
                stored = w.shape[2] // steps
                columns_w = pl.ds(pl.multiple_of(step * stored, stored), stored)
                plgpu.copy_gmem_to_smem(w.at[layer, columns, columns_w], w_smem.at[slot], full.at[slot])

            def drain(released: Any, slots: int) -> None:
                """Waits until the last tiles are released: the interpreter of JAX 0.11 insists."""
                last = pl.loop(jnp.maximum(count - slots, 0), count)
                last(lambda i: plgpu.barrier_wait(released.at[lax.rem(i, jnp.int32(slots))]))

            if not is_int4:
                pl.loop(0, count)(fetch)
                drain(consumed, stages)
                return
            pl.loop(0, jnp.minimum(count, stages - 1))(fetch)

            @pl.loop(0, count)
            def _widen(i: Array) -> None:
                pl.when(i + stages - 1 < count)(lambda: fetch(i + stages - 1))
                slot, wide = lax.rem(i, jnp.int32(stages)), lax.rem(i, jnp.int32(_WIDENED))
                plgpu.barrier_wait(full.at[slot])
                pl.when(i >= _WIDENED)(lambda: plgpu.barrier_wait(used.at[wide]))
                _unpack(w_smem.at[slot], wide_smem.at[wide])
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[wide])

            drain(consumed, stages)
            drain(used, _WIDENED)

        @pl.when(lax.axis_index("wg") < tiles.warpgroups)
        def _compute() -> None:
            row0 = pl.multiple_of(lax.axis_index("wg") * ROWS, ROWS)
            token_rows = pl.ds(pl.multiple_of(at_token * tokens + row0, ROWS), ROWS)

            def column_vector(ref: Any) -> Array:
                loaded = plgpu.load(ref, layout=WGMMA.reduce(0), optimized=False).astype(jnp.float32)
                return lax.broadcast_in_dim(loaded, (ROWS, outputs), [1])

            def row_vector(ref: Any) -> Array:
                loaded = plgpu.load(ref, layout=WGMMA.reduce(1), optimized=False)
                return lax.broadcast_in_dim(loaded, (ROWS, outputs), [0])

            def visit(i: Array, acc: Array) -> Array:
                slot, step = lax.rem(i, jnp.int32(stages)), first + i
                rows = x_smem.at[slot, pl.ds(row0, ROWS)]
                if is_int4:
                    # Loads from global memory: on their way while the tile is.
                    factors = column_vector(scales.at[layer, step, columns])
                    off = row_vector(sums.at[step, token_rows]) * column_vector(zeros.at[layer, step, columns])
                    wide = lax.rem(i, jnp.int32(_WIDENED))
                    plgpu.barrier_wait(ready.at[wide])
                    w_tile = wide_smem.at[wide]
                else:
                    plgpu.barrier_wait(full.at[slot])
                    w_tile = w_smem.at[slot]

                def multiply(product: Any) -> Any:
                    plgpu.wgmma(product, rows, w_tile.transpose((1, 0)))
                    return product[...]

                product: Array = pl.run_scoped(multiply, plgpu.ACC((ROWS, outputs), accumulate))  # type: ignore[attr-defined]
                plgpu.barrier_arrive(consumed.at[slot])
                if is_int4:
                    plgpu.barrier_arrive(used.at[wide])
                    product = (product - off) * factors
                total: Array = acc + product
                return total

            start = plgpu.layout_cast(jnp.zeros((ROWS, outputs), accumulate), WGMMA)
            acc = lax.fori_loop(0, count, visit, start)
            if splits == 1 and not is_int4:
                acc = (
                    acc.astype(jnp.float32)
                    * row_vector(row_scales.at[token_rows])
                    * column_vector(scales.at[layer, columns])
                )
            store(result.at[split, token_rows, columns], acc.astype(result.dtype))

    stored = operands[1].dtype
    scratch = [_tiled((stages, tokens, inputs), operands[0].dtype, swizzle)]
    barriers = [
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=stages),
    ]
    if is_int4:
        scratch += [plgpu.SMEM((stages, outputs, inputs // 2), stored)]
        scratch += [_tiled((_WIDENED, outputs, inputs), jnp.bfloat16, swizzle)]
        barriers += [
            plgpu.Barrier(num_barriers=_WIDENED),
            plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=_WIDENED),
        ]
    else:
        scratch += [_tiled((stages, outputs, inputs), stored, swizzle)]
    parts: Array = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, padded, out), out_dtype if splits == 1 else accumulate),
        grid=(splits, out // outputs, padded // tokens),
        grid_names=("split", "out", "token"),
        num_threads=tiles.warpgroups + 1,
        thread_name="wg",
        kernel_name=f"{KERNEL_NAME}_{weight.kind}",
        scratch_types=(*scratch, *barriers),
    )(*operands, layer)
    return parts


def _unpack(packed: Any, wide: Any) -> None:
    """A tile of bytes as bfloat16: the low halves of a group's bytes, then the high ones."""
    half = packed.shape[1]
    layout = plgpu.Layout.SMEM_GMEM_COPY(packed.shape, jnp.bfloat16, half * 2)
    values = plgpu.load(packed, layout=layout, optimized=False)
    low = (values & jnp.uint8(0x0F)).astype(jnp.bfloat16)
    high = (values & jnp.uint8(0xF0)).astype(jnp.bfloat16) * jnp.bfloat16(
        1 / 16
    )  # shifts of 8-bit values are not to be had
    for part, steps in enumerate((low, high)):
        wide.at[:, pl.ds(part * half, half)][...] = steps
