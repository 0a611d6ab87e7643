"""Weights in the order in which the matmul of `cpu_native` reads them.

It multiplies panels of neighbouring rows, a panel as a matrix of 32-bit words, transposed. A packed weight's arrays have the shapes
and dtypes of the plain one, and its panels lie where their rows would, but the words of a panel are in that order already; rows beyond
the last whole panel are plain. What the bytes are is this library's own affair: on no other backend do they mean anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.native import library
from pallas_kernels.quantized_matmul.weights import Plain, QuantizedWeight

_WORD_BYTES = 4
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)


@struct.dataclass
class PackedWeight:
    """A weight [..., out, in] with permuted bytes. plain: the array or QuantizedWeight that has its shapes and dtypes."""

    plain: Plain

    @property
    def shape(self) -> tuple[int, ...]:
        return self.plain.shape


def can_pack(weight: Plain, shape: Sequence[int]) -> bool:
    """Whether `pack` takes it: float32, bfloat16 or int8 in rows of whole words."""
    dtype = _values(weight).dtype
    return dtype in _DTYPES and shape[-1] * dtype.itemsize % _WORD_BYTES == 0


def pack(weight: Plain, shape: Sequence[int]) -> PackedWeight:
    """Packs a weight that is `shape` [..., out, in] on the CPU where it lies: it must not be used afterwards.

    Raises ValueError for one that `can_pack` refuses, and NativeBuildError.
    """
    if not can_pack(weight, shape):
        raise ValueError(
            f"a weight of shape {tuple(shape)} in {_values(weight).dtype} cannot be packed: it must be float32, bfloat16 or int8, in "
            f"rows of whole words of {_WORD_BYTES} bytes"
        )
    library.load()
    packed = jax.jit(_pack, static_argnums=1, donate_argnums=0)(_values(weight), tuple(shape))
    if isinstance(weight, QuantizedWeight):
        return PackedWeight(dataclasses.replace(weight, values=packed, scales=weight.scales.reshape(shape[:-1])))
    return PackedWeight(packed)


def _values(weight: Plain) -> jax.Array:
    return weight.values if isinstance(weight, QuantizedWeight) else weight


def _pack(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    flat = values.reshape(-1, *shape[-2:])
    call = jax.ffi.ffi_call(
        "jaxkv_pack_weight", jax.ShapeDtypeStruct(flat.shape, flat.dtype), input_output_aliases={0: 0}
    )
    return call(flat).reshape(shape)
