"""Tile sizes of the kernels by device kind and head_dim (`pallas_kernels.device_tables`)."""

from __future__ import annotations

from dataclasses import dataclass

from pallas_kernels.device_tables import table


@dataclass(frozen=True, slots=True)
class Blocks:
    """A TPU block: at most `rows` rows of stacked query heads meet `keys` keys at a time, a multiple of 128.

    vmem_limit: bytes that the compiler may use for a kernel.
    """

    rows: int
    keys: int
    vmem_limit: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """A GPU tile: 128 rows of queries meet `keys` keys at a time, of which `stages` tiles of keys and of values are in flight.

    registers: of a thread in the two warpgroups that multiply, and in the one that copies; 65,536 in all for 384 threads.
    """

    keys: int
    stages: int
    registers: tuple[int, int]


def blocks_for(device_kind: str, head_dim: int) -> Blocks:
    """TPU blocks for a device kind, as JAX names it. Any other device runs an interpreter: it gets those of a plain TPU."""
    numbers = table(__name__, device_kind if device_kind.startswith("TPU") else "TPU")
    return Blocks(**numbers[str(head_dim)], vmem_limit=numbers["vmem_limit"])


def tiles_for(device_kind: str, head_dim: int) -> Tiles:
    """GPU tiles for a device kind. Any other device runs an interpreter, as above."""
    numbers = table(__name__, device_kind if device_kind.startswith("NVIDIA") else "NVIDIA")[str(head_dim)]
    return Tiles(numbers["keys"], numbers["stages"], tuple(numbers["registers"]))
