"""Quantized matmul on TPU: blocks of weights stream through VMEM once, stay in 8 or 4 bits there, and meet a tile of tokens.

The weight of a stack is read where it lies: the layer is a scalar that the block index maps see. int8 products run on the matrix
unit as such where the chip has them. An int4 group is multiplied as the integers 0..15, exact in bfloat16; its scale and zero point
are applied to the group's sums, which costs less than to weights as long as a tile has fewer tokens than a group has
inputs, and is more exact always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_matmul.activations import even_then_odd, quantize_rows
from pallas_kernels.quantized_matmul.tuning import Blocks
from pallas_kernels.quantized_matmul.weights import Kind, QuantizedWeight

KERNEL_NAME = "quantized_matmul"
LANES = 128
MAX_UNDIVIDED_INPUTS = 8192
"""A weight whose inputs are not whole registers takes all of them in one block, which must fit VMEM twice."""
_ROWS = 32
"""Tokens are padded to whole registers of the narrowest dtype."""
_LAST_AXES = (((1,), (1,)), ((), ()))


def matmul(
    x: Float[Array, "T in"],
    weight: QuantizedWeight,
    layer: Int[Array, ""],
    out_dtype: jnp.dtype,
    *,
    blocks: Blocks,
    interpret: Any = False,
) -> Float[Array, "T out"]:
    """Contract: `pallas_kernels.quantized_matmul.api`; the weight is a stack [L, out, in]. `interpret` is `pl.pallas_call`'s."""
    T = x.shape[0]
    _, out, width = weight.shape
    tokens = min(blocks.tokens, -(-T // _ROWS) * _ROWS)
    outputs = min(blocks.outputs, out // LANES * LANES or out)
    inputs = input_block(width, blocks.inputs, packed=weight.kind == "int4")
    x = jnp.pad(x, ((0, -T % tokens), (0, 0)))
    layer = layer.reshape(1)
    block = (tokens, outputs, inputs)
    native = blocks.native_8bit
    call = _of_int4(x, weight, block) if weight.kind == "int4" else _of_bytes(x, weight, layer, block, native)
    result: Array = pl.pallas_call(
        call.kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], out), out_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(x.shape[0] // tokens, pl.cdiv(out, outputs), width // inputs),
            in_specs=[spec for _, spec in call.operands],
            out_specs=_spec((tokens, outputs), lambda t, o, _: (t, o)),
            scratch_shapes=call.scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name=f"{KERNEL_NAME}_{weight.kind}",
    )(layer, *(array for array, _ in call.operands))
    return result[:T]


@dataclass(frozen=True)
class _Call:
    """What depends on the kind: the kernel, its operands and the blocks of each, and its scratch memory."""

    kernel: Any
    operands: list[tuple[Array, pl.BlockSpec]]
    scratch: list[Any]


def _of_int4(x: Array, weight: QuantizedWeight, block: tuple[int, int, int]) -> _Call:
    tokens, outputs, inputs = block
    groups = weight.shape[-1] // weight.group
    grouped = _layer_spec((groups, outputs), lambda _, o, __: (0, o))
    assert weight.zero_points is not None
    return _Call(
        _int4_kernel(weight.group),
        [
            (even_then_odd(x.astype(jnp.bfloat16), weight.group), _spec((tokens, inputs), lambda t, _, i: (t, i))),
            (weight.values, _layer_spec((outputs, inputs // 2), lambda _, o, i: (o, i))),
            (weight.scales, grouped),
            (weight.zero_points, grouped),
        ],
        [pltpu.VMEM((tokens, outputs), jnp.float32), pltpu.VMEM((groups, outputs), jnp.float32)],
    )


def _of_bytes(x: Array, weight: QuantizedWeight, layer: Array, block: tuple[int, int, int], native_8bit: bool) -> _Call:
    tokens, outputs, inputs = block
    values, row_scales = quantize_rows(x, weight.kind)
    # One layer's scales are a few kilobytes: sliced, where the weight is not.
    scales = lax.dynamic_index_in_dim(weight.scales, layer[0], keepdims=True)
    return _Call(
        _bytes_kernel if native_8bit else _widened_kernel,
        [
            (values, _spec((tokens, inputs), lambda t, _, i: (t, i))),
            (weight.values, _layer_spec((outputs, inputs), lambda _, o, i: (o, i))),
            (row_scales[:, None], _spec((tokens, 1), lambda t, _, __: (t, 0))),
            (scales, _spec((1, outputs), lambda _, o, __: (0, o))),
        ],
        [pltpu.VMEM((tokens, outputs), jnp.int32 if native_8bit and weight.kind == "int8" else jnp.float32)],
    )


def _spec(block: tuple[int, int], index: Any) -> pl.BlockSpec:
    """A block of a matrix at index(tokens, outputs, inputs)."""
    return pl.BlockSpec(block, lambda t, o, i, _: index(t, o, i))


def _layer_spec(block: tuple[int, int], index: Any) -> pl.BlockSpec:
    """The same of a stack, at the layer of the call."""
    return pl.BlockSpec((None, *block), lambda t, o, i, layer: (layer[0], *index(t, o, i)))


def check_supported(kind: Kind, out_features: int, in_features: int) -> None:
    """Raises ValueError for numbers of outputs and inputs that cannot be cut into blocks."""
    if kind == "int4" and out_features < LANES and out_features % 4:
        raise ValueError(
            f"matmul backend 'mosaic_tpu' unpacks int4 weights four rows at a time: {out_features} outputs must be a multiple "
            f"of 4, or at least {LANES}"
        )
    unit = LANES * 2 if kind == "int4" else LANES
    if in_features > MAX_UNDIVIDED_INPUTS and in_features % unit:
        raise ValueError(
            f"matmul backend 'mosaic_tpu' cannot cut {in_features} inputs of an {kind} weight into blocks: above "
            f"{MAX_UNDIVIDED_INPUTS} they must be a multiple of {unit}"
        )


def input_block(width: int, largest: int, *, packed: bool) -> int:
    """Inputs of a block: whole registers of stored values that divide `width`, or all of it where nothing does."""
    unit = LANES * 2 if packed else LANES
    blocks = [block for block in range(unit, min(largest, width) + 1, unit) if width % block == 0]
    return blocks[-1] if blocks else width


def _bytes_kernel(_: Any, x: Any, w: Any, row_scales: Any, scales: Any, out: Any, acc: Any) -> None:
    _accumulate(acc, lax.dot_general(x[...], w[...], _LAST_AXES, preferred_element_type=acc.dtype))
    _finish(acc, row_scales, scales, out)


def _widened_kernel(_: Any, x: Any, w: Any, row_scales: Any, scales: Any, out: Any, acc: Any) -> None:
    """bfloat16 holds every int8 and e4m3 value, and float32 every product of two."""
    wide = (x[...].astype(jnp.bfloat16), w[...].astype(jnp.bfloat16))
    _accumulate(acc, lax.dot_general(*wide, _LAST_AXES, preferred_element_type=jnp.float32))
    _finish(acc, row_scales, scales, out)


def _accumulate(acc: Any, product: Array) -> None:
    first = pl.program_id(2) == 0

    @pl.when(first)
    def _set() -> None:
        acc[...] = product

    @pl.when(jnp.logical_not(first))
    def _add() -> None:
        acc[...] += product


def _finish(acc: Any, row_scales: Any, scales: Any, out: Any) -> None:
    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _write() -> None:
        out[...] = (acc[...].astype(jnp.float32) * row_scales[...] * scales[...]).astype(out.dtype)


def _int4_kernel(group: int) -> Any:
    def kernel(_: Any, x: Any, w: Any, scales: Any, zero_points: Any, out: Any, acc: Any, zeros: Any) -> None:
        step = pl.program_id(2)
        groups = x.shape[1] // group

        @pl.when(step == 0)
        def _start() -> None:
            acc[...] = jnp.zeros_like(acc)
            zeros[...] = zero_points[...].astype(jnp.int32).astype(jnp.float32)

        low, high = _nibbles(w[...])
        total = acc[...]
        for g in range(groups):
            columns = slice(g * group // 2, (g + 1) * group // 2)
            steps = jnp.concatenate([low[:, columns], high[:, columns]], axis=1)
            rows = x[:, g * group : (g + 1) * group]
            dots = lax.dot_general(rows, steps, _LAST_AXES, preferred_element_type=jnp.float32)
            sums = jnp.sum(rows.astype(jnp.float32), axis=1, keepdims=True)
            at = pl.ds(step * groups + g, 1)
            total += (dots - sums * zeros[at, :]) * scales[at, :]
        acc[...] = total

        @pl.when(step == pl.num_programs(2) - 1)
        def _write() -> None:
            out[...] = acc[...].astype(out.dtype)

    return kernel


def _nibbles(packed: Array) -> tuple[Array, Array]:
    """The low and the high four bits of bytes, as bfloat16: both masks act on four bytes at a time."""
    words = pltpu.bitcast(packed, jnp.int32)
    mask = jnp.int32(0x0F0F0F0F)
    low, high = words & mask, (words >> 4) & mask
    return pltpu.bitcast(low, jnp.int8).astype(jnp.bfloat16), pltpu.bitcast(high, jnp.int8).astype(jnp.bfloat16)
