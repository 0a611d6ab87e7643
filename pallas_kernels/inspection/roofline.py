"""The static rooflines of a kernel: cycles of its steady block loop against the cycles that the loop's copies need, and cycles of
each stretch of code that multiplies against those that its products need.

The steady path is what runs when every block is full and unmasked. Left out are the ragged edges of the loop: the innermost
conditional region around a nested loop (copies page by page, clearing of a tail), and of the regions that hold matmuls (the block's
fold with and without masks) all but the shortest without a loop.
"""

from __future__ import annotations

import collections
import dataclasses

from pallas_kernels.inspection.llo_bundles import Bundle, Schedule, Span
from pallas_kernels.inspection.scoreboard import CoreTiming, cycles, matmul_unit_and_cycles


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Of one pass of the steady loop (a KV block): bundles, cycles with stalls, and bytes copied with the cycles that these take at
    the chip's HBM rate. item_cycles: spent around the loop, once per item."""

    bundles: int
    cycles: int
    dma_bytes: int
    dma_cycles: float
    item_cycles: int

    def ratio(self, blocks_per_item: float = float("inf")) -> float:
        """Core cycles over copy cycles: below 1, the kernel is bound by memory."""
        return (self.cycles + self.item_cycles / blocks_per_item) / self.dma_cycles


@dataclasses.dataclass(frozen=True)
class Products:
    """Of a stretch of code that multiplies, run once: its cycles with stalls, and those that the busiest matrix unit multiplies in."""

    cycles: int
    matmul_cycles: int

    @property
    def share(self) -> float:
        """1 where the matrix units never wait. Not of their peak: operands may be smaller than a unit is deep or wide."""
        return self.matmul_cycles / self.cycles


def products(schedule: Schedule, timing: CoreTiming) -> list[Products]:
    """The loops and the conditional regions that hold matmuls, but no other such loop or region; in order of the code."""
    holders = [span for span in {*schedule.loops, *schedule.regions} if _matmuls(schedule, span)]
    innermost = [one for one in holders if not any(one.contains(other) for other in holders)]
    found = []
    for span in sorted(innermost, key=lambda span: span.start):
        busy: dict[str, int] = collections.Counter()
        for operation in schedule.operations(span):
            if operation.name.startswith("vmatmul"):
                unit, taken = matmul_unit_and_cycles(operation.name, timing)
                busy[unit] += taken
        found.append(Products(cycles(schedule.bundles[span.start : span.stop], timing), max(busy.values())))
    return found


def _matmuls(schedule: Schedule, span: Span) -> int:
    return sum(op.name.startswith("vmatmul") for op in schedule.operations(span))


def _copied_bytes(bundles: list[Bundle]) -> int:
    return sum(op.dma_bytes_to_vmem for bundle in bundles for op in bundle.operations)


def _edges(schedule: Schedule, loop: Span) -> list[Span]:
    inside = [region for region in schedule.regions if loop.contains(region)]

    def innermost(holders: list[Span]) -> list[Span]:
        return [one for one in holders if not any(one.contains(other) for other in holders)]

    edges = []
    for nested in schedule.loops:
        if loop.contains(nested):
            edges += innermost([region for region in inside if region == nested or region.contains(nested)])
    folds = [region for region in inside if _matmuls(schedule, region)]
    straight = [one for one in folds if not any(one == other or one.contains(other) for other in schedule.loops)]
    if straight:
        steady = min(innermost(straight), key=len)
        edges += [region for region in folds if region != steady and not region.contains(steady)]
    return edges


def _without(schedule: Schedule, span: Span, left_out: list[Span]) -> list[Bundle]:
    keep = set(range(span.start, span.stop))
    for one in left_out:
        keep -= set(range(one.start, one.stop))
    return [schedule.bundles[i] for i in sorted(keep)]


def roofline(schedule: Schedule, timing: CoreTiming) -> Roofline:
    """Of the innermost loop that holds both matmuls and copies from HBM. Raises ValueError for a kernel without such a loop."""
    hot = [
        loop
        for loop in schedule.loops
        if _matmuls(schedule, loop) and _copied_bytes(list(schedule.bundles[loop.start : loop.stop]))
    ]
    if not hot:
        raise ValueError("no loop of this kernel holds both matmuls and copies from HBM")
    loop = min(hot, key=len)
    steady = _without(schedule, loop, _edges(schedule, loop))
    if not any(op.name.startswith("vmatmul") for bundle in steady for op in bundle.operations):
        raise ValueError("the loop that holds matmuls and copies has none outside of its inner loops and edges")
    item_cycles = 0
    around = [other for other in schedule.loops if other.contains(loop)]
    if around:
        parent = min(around, key=len)
        edges = [region for region in schedule.regions if parent.contains(region) and not region.contains(loop)]
        edges = [region for region in edges if any(region.contains(other) for other in schedule.loops)]
        item_cycles = cycles(_without(schedule, parent, [loop, *edges]), timing)
    copied = _copied_bytes(steady)
    return Roofline(len(steady), cycles(steady, timing), copied, copied / timing.bytes_per_cycle, item_cycles)
