"""Weights in the order in which the matmul of `cpu_native` reads them.

It multiplies panels of neighbouring rows, a panel as a matrix of 32-bit words, transposed. A packed weight's arrays have the shapes
and dtypes of the plain one, and its panels lie where their rows would, but the words of a panel are in that order already; rows beyond
the last whole panel are plain. What the bytes are is this library's own affair: on no other backend do they mean anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from flax import struct

from pallas_kernels.native import library
from pallas_kernels.quantized_matmul.weights import QuantizedWeight

_WORD_BYTES = 4


@struct.dataclass
class PackedWeight:
    """A weight [..., out, in] with permuted bytes. plain: the array or QuantizedWeight that has its shapes and dtypes."""

    plain: jax.Array | QuantizedWeight

    @property
    def shape(self) -> tuple[int, ...]:
        return self.plain.shape


def can_pack(weight: jax.Array | QuantizedWeight, shape: Sequence[int]) -> bool:
    """Whether `pack` takes it: rows of whole words, and for the quantized of kind int8."""
    if isinstance(weight, QuantizedWeight) and weight.kind != "int8":
        return False
    return shape[-1] * _values(weight).dtype.itemsize % _WORD_BYTES == 0


def pack(weight: jax.Array | QuantizedWeight, shape: Sequence[int]) -> PackedWeight:
    """Packs a weight that is `shape` [..., out, in] on the CPU where it lies: it must not be used afterwards.

    Raises ValueError for one that `can_pack` refuses, and NativeBuildError.
    """
    if not can_pack(weight, shape):
        raise ValueError(f"a weight of shape {tuple(shape)} cannot be packed: its rows are not whole words of 4 bytes")
    library.load()
    packed = jax.jit(_pack, static_argnums=1, donate_argnums=0)(_values(weight), tuple(shape))
    if isinstance(weight, QuantizedWeight):
        return PackedWeight(dataclasses.replace(weight, values=packed, scales=weight.scales.reshape(shape[:-1])))
    return PackedWeight(packed)


def _values(weight: jax.Array | QuantizedWeight) -> jax.Array:
    return weight.values if isinstance(weight, QuantizedWeight) else weight


def _pack(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    flat = values.reshape(-1, *shape[-2:])
    call = jax.ffi.ffi_call(
        "jaxkv_pack_weight", jax.ShapeDtypeStruct(flat.shape, flat.dtype), input_output_aliases={0: 0}
    )
    return call(flat).reshape(shape)
