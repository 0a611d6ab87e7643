"""The roles of a thread block's warpgroups: two multiply 64 rows of queries each, a third one brings what they need."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Rows of a warpgroup that multiplies: the M of `wgmma`."""
CONSUMERS = 2
WGMMA = plgpu.Layout.WGMMA
ROW, COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
"""A number for each row, or column, of a WGMMA array."""


def in_roles(wg: Array, registers: tuple[int, int], consume: Callable[[], None], produce: Callable[[], None]) -> None:
    """Runs `consume` in the warpgroups below CONSUMERS and `produce` in the one after them, with so many registers for a thread."""
    consumers, producer = registers

    def compute() -> None:
        plgpu.set_max_registers(consumers, action="increase")
        consume()

    def copy() -> None:
        plgpu.set_max_registers(producer, action="decrease")
        produce()

    # One or the other: with a sequence of `when`s, what later roles need would live through the consumers' code.
    lax.cond(wg < CONSUMERS, compute, copy)
