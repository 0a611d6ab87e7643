"""Block sizes of the kernels by device kind (`pallas_kernels.device_tables`)."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.device_tables import table
from pallas_kernels.quantized_matmul.weights import Kind


@dataclass(frozen=True, slots=True)
class Blocks:
    """A TPU block: tokens x outputs of the result, from `inputs` at a time.

    native_8bit: the matrix unit multiplies the stored dtype; else it is widened to bfloat16 in the kernel.
    """

    tokens: int
    outputs: int
    inputs: int
    native_8bit: bool = False


@dataclass(frozen=True, slots=True)
class Tiles:
    """A GPU tile: `outputs` columns of the result for each of `warpgroups` x 64 tokens, from `inputs` at a time.

    stages: tiles of operands in flight. blocks: inputs are split until the grid is about so large. max_tokens: the widest step
    that takes these tiles, None for any. registers: of a thread in the warpgroups that multiply, and in the one that copies; None
    for the same in all.
    """

    outputs: int
    inputs: int
    stages: int
    warpgroups: int
    blocks: int = 132
    max_tokens: int | None = None
    registers: tuple[int, int] | None = None


def blocks_for(device_kind: str, kind: Kind) -> Blocks:
    """TPU blocks for a device kind, as JAX names it. Any other device runs an interpreter: it gets those of a plain TPU."""
    return Blocks(**table(__name__, device_kind if device_kind.startswith("TPU") else "TPU")[kind])


def tiles_for(device_kind: str, kind: Kind, tokens: int) -> Tiles:
    """GPU tiles for a device kind and a step of `tokens` tokens. Any other device runs an interpreter, as above."""
    numbers = table(__name__, device_kind if device_kind.startswith("NVIDIA") else "NVIDIA")
    choices = [_tiles(**entry) for entry in numbers[kind]]
    return next(tiles for tiles in choices if tiles.max_tokens is None or tokens <= tiles.max_tokens)


def _tiles(registers: list[int] | None = None, **numbers: int) -> Tiles:
    return Tiles(**numbers, registers=None if registers is None else (registers[0], registers[1]))
