"""What the warpgroups of the Hopper matmul share: static facts, references, and the part of the result that a thread block owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.memory import Ref
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.hopper.warpgroups import ROWS
from pallas_kernels.quantized_matmul.tuning import Tiles
from pallas_kernels.quantized_matmul.weights import Kind, QuantizedWeight

MIN_OUTPUTS, MIN_INPUTS = 16, 64
WIDENED = 2
"""Unpacked int4 tiles in flight."""
_MIN_STEPS = 8
"""A split of the inputs is worth at least so many tiles."""


@dataclass(frozen=True)
class Kernel:
    """Static facts. rows, out: of the result, rows padded. outputs, inputs: of a tile. steps: tiles of a row. splits: of the inputs."""

    kind: Kind
    tiles: Tiles
    rows: int
    out: int
    outputs: int
    inputs: int
    steps: int
    splits: int

    @property
    def tokens(self) -> int:
        """Of a thread block."""
        return ROWS * self.tiles.warpgroups

    @property
    def is_int4(self) -> bool:
        return self.kind == "int4"

    @property
    def accumulate(self) -> Any:
        return jnp.int32 if self.kind == "int8" else jnp.float32


def make_kernel(stack: QuantizedWeight, tiles: Tiles, rows: int) -> Kernel:
    """The kernel for a stack [L, out, in] and so many rows of activations, a multiple of a block's tokens."""
    _, out, width = stack.shape
    outputs = _divisor(out, tiles.outputs, MIN_OUTPUTS)
    inputs = stack.group if stack.kind == "int4" else _divisor(width, tiles.inputs, MIN_INPUTS)
    blocks = rows // (ROWS * tiles.warpgroups) * (out // outputs)
    steps = width // inputs
    splits = max(1, min(tiles.blocks // blocks, steps // _MIN_STEPS))
    return Kernel(stack.kind, tiles, rows, out, outputs, inputs, steps, splits)


def _divisor(size: int, largest: int, smallest: int) -> int:
    """The largest of largest, largest/2, ... that divides `size`; `smallest` does."""
    tile = largest
    while tile > smallest and size % tile:
        tile //= 2
    return tile


@dataclass(frozen=True)
class Part:
    """What one thread block multiplies, all of the running kernel: `count` steps of inputs from `first` on.

    token: the first of its rows. columns: its outputs.
    """

    layer: Array
    split: Array
    first: Array
    count: Array
    token: Array
    columns: Any


@dataclass(frozen=True)
class Call:
    """Static facts, and references. of_rows: scales [T] of activations; int4: their sums [steps, T] over each group.

    scratch: what `mosaic_gpu` allocates.
    """

    kernel: Kernel
    x: Ref
    w: Ref
    of_rows: Ref
    scales: Ref
    zeros: Ref | None
    layer: Ref
    result: Ref
    scratch: dict[str, Ref]

    @property
    def rings(self) -> tuple[Ring, Ring]:
        """Of activations and of stored weights, which share their barriers: a slot is full with both."""
        s, stages = self.scratch, self.kernel.tiles.stages
        x, w = (Ring(s[name], s["full"], s["free"], stages) for name in "xw")
        return x, w

    @property
    def wide(self) -> Ring:
        """Of unpacked int4 weights."""
        s = self.scratch
        return Ring(s["wide"], s["wide_full"], s["wide_free"], WIDENED)

    def part(self) -> Part:
        """This thread block's."""
        kernel = self.kernel
        split, at_out, at_token = (lax.axis_index(name) for name in ("split", "out", "token"))
        steps, splits = kernel.steps, jnp.int32(kernel.splits)
        first = lax.div(split * steps, splits)
        count = lax.div((split + 1) * steps, splits) - first
        columns = pl.ds(pl.multiple_of(at_out * kernel.outputs, kernel.outputs), kernel.outputs)
        return Part(self.layer[0], split, first, count, at_token * kernel.tokens, columns)
