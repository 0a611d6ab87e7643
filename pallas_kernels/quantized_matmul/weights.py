"""Weights in 8 or 4 bits: the pytree that holds them, the quantizer that makes them on the host, and their inverse.

A weight is [..., out, in], contracted on its last axis; leading axes are stacked layers.

    kind      values                         scales                        zero_points                w =
    int8      int8 [..., out, in]            float32 [..., out]            None                       value * scale
    fp8_e4m3  float8_e4m3fn [..., out, in]   float32 [..., out]            None                       value * scale
    int4      uint8 [..., out, in/2]         float32 [..., in/group, out]  uint8, shape of the scales (value - zero) * scale

Byte j of an int4 row holds inputs 2j (low four bits) and 2j + 1 (high four bits), both of group 2j // group. Its scales and zero
points have `out` last, as AWQ stores them: with `in/group` last, a TPU would pad each short row of them to 128 lanes.

Sharding over `out` cuts all arrays on that axis. Sharding over `in` cuts the values, and of int4 the scales and zero points too (a
shard is a whole number of groups); the scales of int8 and fp8_e4m3 belong to whole rows and are replicated. `partition_specs`
says so in code.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_matmul.rotation import rotate, rotate_weight

Kind = Literal["int8", "fp8_e4m3", "int4"]
KINDS: tuple[Kind, ...] = get_args(Kind)
GROUPS = (32, 64, 128)
"""Inputs that share one scale and zero point of an int4 weight."""

LARGEST: dict[Kind, float] = {"int8": 127.0, "fp8_e4m3": 448.0}
"""The largest magnitude of a stored value, which stands for the largest magnitude of its row."""

_FLOAT32_BLOCK = 1 << 20
"""Elements that are in float32 at a time while a weight is quantized."""


@struct.dataclass
class QuantizedWeight:
    """A weight [..., out, in] in 8 or 4 bits; see the module's table. Arrays are numpy's on the host, JAX's on devices.

    rotated: the values stand for the weight after `rotation.rotate_weight`, and activations are rotated before they meet them.
    """

    values: jax.Array
    scales: jax.Array
    zero_points: jax.Array | None = None
    kind: Kind = struct.field(pytree_node=False, kw_only=True)  # type: ignore[no-untyped-call]
    rotated: bool = struct.field(pytree_node=False, kw_only=True, default=False)  # type: ignore[no-untyped-call]

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in] of the weight that this stands for."""
        *lead, columns = self.values.shape
        return (*lead, columns * 2 if self.kind == "int4" else columns)

    @property
    def group(self) -> int:
        """Inputs that share a scale: all of them, but for int4."""
        return self.shape[-1] // self.scales.shape[-2] if self.kind == "int4" else self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


Plain = jax.Array | QuantizedWeight
"""A weight whose bytes are in the order of its shape."""


def layer_of(stack: Plain, layer: Int[Array, ""]) -> Plain:
    """One layer [...] of a stack [L, ...]."""
    one: Plain = jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False), stack)
    if isinstance(one, QuantizedWeight):
        # XLA would cut the scales from their stack in the middle of an elementwise loop, which its CPU backend then does not vectorize.
        return dataclasses.replace(one, scales=jax.lax.optimization_barrier(one.scales))
    return one


def quantize(weight: np.ndarray[Any, Any], kind: Kind, *, group: int = 128, rotated: bool = False) -> QuantizedWeight:
    """Quantizes a host array [..., out, in] of any float dtype; the result holds numpy arrays.

    int8 and fp8_e4m3: symmetric, the largest magnitude of a row becomes 127 or 448. int4: each `group` inputs of a row are spread
    over 0..15 from their minimum to their maximum, zero included. A row (or group) of zeros stays zeros.
    rotated: with inputs rotated, int8 only: an FP8 activation is as exact beside an outlier, and int4's are not quantized.
    Beside the result this takes a few MiB, however large the weight is.

    Raises ValueError for a weight that is not a matrix or a stack of them, holds NaN or infinity, or has a length that the kind
    cannot pack.
    """
    check_kind(kind)
    if rotated and kind != "int8":
        raise ValueError(f"{kind} weights are not rotated: only int8 activations suffer from outliers")
    if weight.ndim < 2:
        raise ValueError(f"a weight to quantize must be [..., out, in], not of shape {weight.shape}")
    *lead, width = weight.shape
    if kind == "int4":
        check_group(width, group)
    values, scales, zero_points = _allocate(lead, width, kind, group)
    step = max(1, _FLOAT32_BLOCK // max(width, 1))
    for index in np.ndindex(*lead[:-1]):
        for start in range(0, lead[-1], step):
            rows = slice(start, start + step)
            wide = weight[index][rows].astype(np.float32)
            if not np.isfinite(wide).all():
                row = start + int(np.argmin(np.isfinite(wide).all(axis=1)))
                raise ValueError(
                    f"row {', '.join(map(str, (*index, row)))} of a weight of shape {weight.shape} holds NaN or infinity: "
                    "it cannot be quantized"
                )
            if zero_points is None:
                turned = rotate_weight(wide) if rotated else wide
                values[index][rows], scales[index][rows] = _quantize_rows(turned, kind)
            else:
                values[index][rows], group_scales, group_zeros = _quantize_groups(wide, group)
                scales[index][:, rows], zero_points[index][:, rows] = group_scales.T, group_zeros.T
    arrays = cast(tuple[jax.Array, jax.Array, jax.Array | None], (values, scales, zero_points))
    return QuantizedWeight(*arrays, kind=kind, rotated=rotated)


def dequantize(weight: QuantizedWeight, dtype: Any = jnp.float32) -> Float[Array, "*lead in"]:
    """The weight as floats: what it stands for, in float32, rounded once to `dtype`."""
    if weight.kind != "int4":
        wide = weight.values.astype(jnp.float32) * weight.scales[..., None]
        return (rotate(wide.reshape(-1, wide.shape[-1])).reshape(wide.shape) if weight.rotated else wide).astype(dtype)
    assert weight.zero_points is not None
    shape = weight.shape
    grouped = unpack_int4(weight.values).reshape(*shape[:-1], -1, weight.group)
    return _restore(grouped, weight.scales.mT, weight.zero_points.mT).reshape(shape).astype(dtype)


def lookup(table: QuantizedWeight, rows: Int[Array, " T"], dtype: Any) -> Float[Array, "T in"]:
    """Rows of a table [out, in], dequantized: the embedding of tokens when it is tied to a quantized output matrix."""

    def pick(array: Array) -> Array:
        return array.at[rows].get(mode="promise_in_bounds")

    if table.kind != "int4":
        rotated = table.rotated
        picked = QuantizedWeight(pick(table.values), pick(table.scales), kind=table.kind, rotated=rotated)
        return dequantize(picked, dtype)
    assert table.zero_points is not None
    grouped = unpack_int4(pick(table.values)).reshape(len(rows), -1, table.group)
    return _restore(grouped, pick(table.scales.T), pick(table.zero_points.T)).reshape(len(rows), -1).astype(dtype)


def _restore(
    grouped: Int[Array, "*lead groups group"],
    scales: Float[Array, "*lead groups"],
    zero_points: Int[Array, "*lead groups"],
) -> Float[Array, "*lead groups group"]:
    steps = grouped.astype(jnp.int32) - zero_points[..., None].astype(jnp.int32)
    return steps.astype(jnp.float32) * scales[..., None]


def unpack_int4(values: Int[Array, "*lead bytes"]) -> Int[Array, "*lead in"]:
    """Packed bytes as uint8 values 0..15, in the order of the inputs."""
    pairs = jnp.stack([values & jnp.uint8(15), values >> jnp.uint8(4)], axis=-1)
    return pairs.reshape(*values.shape[:-1], -1)


def partition_specs(kind: Kind, *axes: str | None, rotated: bool = False) -> QuantizedWeight:
    """The PartitionSpec of each array, in the pytree's shape, for a weight whose axes (..., out, in) are sharded over `axes`."""
    *lead, out_axis, in_axis = axes
    values = PartitionSpec(*axes)
    if kind == "int4":
        grouped = PartitionSpec(*lead, in_axis, out_axis)
        return QuantizedWeight(cast(Any, values), cast(Any, grouped), cast(Any, grouped), kind=kind)
    return QuantizedWeight(cast(Any, values), cast(Any, PartitionSpec(*lead, out_axis)), kind=kind, rotated=rotated)


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"quantization {kind!r} is unknown: it must be one of {', '.join(KINDS)}")


def check_group(width: int, group: int) -> None:
    """Raises ValueError unless int4 weights of `width` inputs can be cut into groups of `group`."""
    if group not in GROUPS:
        raise ValueError(f"an int4 group of {group} is not supported: it must be one of {', '.join(map(str, GROUPS))}")
    if width % group:
        raise ValueError(f"{width} inputs cannot be cut into int4 groups of {group}: choose a group that divides them")


def _allocate(
    lead: list[int], width: int, kind: Kind, group: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    if kind == "int4":
        grouped = (*lead[:-1], width // group, lead[-1])
        return np.empty((*lead, width // 2), np.uint8), np.empty(grouped, np.float32), np.empty(grouped, np.uint8)
    stored = np.int8 if kind == "int8" else ml_dtypes.float8_e4m3fn
    return np.empty((*lead, width), stored), np.empty(lead, np.float32), None


def _quantize_rows(wide: np.ndarray[Any, Any], kind: Kind) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    largest = np.float32(LARGEST[kind])
    scales = _nonzero(np.abs(wide).max(axis=1, initial=0.0) / largest)
    # The division may end a rounding error beyond the largest value, and far beyond it where the scale is subnormal.
    steps = np.clip(wide / scales[:, None], -largest, largest)
    return (np.rint(steps).astype(np.int8) if kind == "int8" else steps.astype(ml_dtypes.float8_e4m3fn)), scales


def _quantize_groups(
    wide: np.ndarray[Any, Any], group: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    grouped = wide.reshape(len(wide), -1, group)
    low, high = grouped.min(axis=2, initial=0.0), grouped.max(axis=2, initial=0.0)
    # Divided before the subtraction, which could overflow.
    scales = _nonzero(high / np.float32(15) - low / np.float32(15))
    zero_points = np.clip(np.rint(-low / scales), 0, 15)
    steps = np.rint(grouped / scales[..., None]) + zero_points[..., None]
    unpacked = np.clip(steps, 0, 15).astype(np.uint8).reshape(len(wide), -1, 2)
    return unpacked[..., 0] | unpacked[..., 1] << 4, scales, zero_points.astype(np.uint8)


def _nonzero(scales: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(scales > 0, scales, np.float32(1)).astype(np.float32)
