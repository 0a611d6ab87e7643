"""The roles of a thread block's warpgroups: one or two multiply 64 rows each, another one brings what they need."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows of a warpgroup that multiplies: the M of `wgmma`."""
CONSUMERS = 2
"""Warpgroups that multiply, in the attention kernels."""
WGMMA = plgpu.Layout.WGMMA
ROW, COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
"""A number for each row, or column, of a WGMMA array."""


def in_roles(
    wg: Array,
    registers: tuple[int, int] | None,
    consume: Callable[[], None],
    produce: Callable[[], None],
    *,
    consumers: int = CONSUMERS,
) -> None:
    """Runs `consume` in the warpgroups below `consumers` and `produce` in the one after them.

    registers: for a thread that consumes, and for one that produces; None leaves each what the kernel starts with.
    """

    def compute() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[0], action="increase")
        consume()

    def copy() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers[1], action="decrease")
        produce()

    # One or the other: with a sequence of `when`s, what later roles need would live through the consumers' code.
    lax.cond(wg < consumers, compute, copy)
