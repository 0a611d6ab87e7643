"""The static roofline of a streaming kernel: cycles of its steady block loop against the cycles its copies need.

The steady path is what runs when every block is full and unmasked: of the loop that holds the block's copies, the bundles
outside of ragged edges. A conditional region is a ragged edge if it holds a loop of its own (page-by-page copies, clearing
of a tail) or if it is the slower of two versions of the block's matmuls.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.inspection.llo_bundles import Bundle, Schedule, Span
from pallas_kernels.inspection.scoreboard import CoreTiming, cycles


@dataclasses.dataclass(frozen=True)
class ChipRates:
    """Bytes per core cycle from HBM; clocks are inferred from the published peak FLOP/s."""

    hbm_bytes_per_second: float
    clock_hz: float

    @property
    def bytes_per_cycle(self) -> float:
        return self.hbm_bytes_per_second / self.clock_hz


RATES = {"v5e": ChipRates(819e9, 1.5e9), "v6e": ChipRates(1640e9, 1.75e9)}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Per block of a steady loop, and once per item around it."""

    bundles: int
    cycles: int
    dma_bytes: int
    item_cycles: int

    def ratio(self, rates: ChipRates, blocks_per_item: float = float("inf")) -> float:
        """Core cycles over copy cycles: below 1, the kernel is bound by memory."""
        return (self.cycles + self.item_cycles / blocks_per_item) / (self.dma_bytes / rates.bytes_per_cycle)


def _matmuls(schedule: Schedule, span: Span) -> int:
    return sum(op.name.startswith("vmatmul") for op in schedule.operations(span))


def _steady(schedule: Schedule, loop: Span) -> list[Bundle]:
    """Bundles of one full, unmasked pass of `loop`."""
    inside = [region for region in schedule.regions if loop.contains(region)]
    skipped = [region for region in inside if any(region == other or region.contains(other) for other in schedule.loops)]
    # A region around the whole body is no edge: keep what holds the loop's own steady copies or matmuls.
    folds = [region for region in inside if _matmuls(schedule, region)]
    folds = [region for region in folds if not any(region.contains(other) for other in folds)]
    if len(folds) > 1:
        best = min(folds, key=len)
        skipped += [region for region in folds if region != best]
    else:
        best = None
    keep = set(range(loop.start, loop.stop))
    for region in sorted(skipped, key=len):
        covered = set(range(region.start, region.stop))
        if best is not None and best.start in covered:
            continue
        if any(other in skipped and region.contains(other) for other in skipped if other != region) and _dma_bytes(
            schedule, covered & keep
        ):
            continue
        keep -= covered
    return [schedule.bundles[i] for i in sorted(keep)]


def _dma_bytes(schedule: Schedule, addresses: set[int]) -> int:
    return sum(op.dma_bytes_to_vmem for i in addresses for op in schedule.bundles[i].operations)


def roofline(schedule: Schedule, timing: CoreTiming) -> Roofline:
    """Of the innermost loop that holds both matmuls and copies."""
    hot = [
        loop
        for loop in schedule.loops
        if _matmuls(schedule, loop) and _dma_bytes(schedule, set(range(loop.start, loop.stop)))
    ]
    if not hot:
        raise ValueError("no loop of this kernel holds both matmuls and copies from HBM")
    loop = min(hot, key=len)
    steady = _steady(schedule, loop)
    outer = [other for other in schedule.loops if other.contains(loop)]
    item_cycles = 0
    if outer:
        parent = min(outer, key=len)
        edges = [r for r in schedule.regions if parent.contains(r) and not r.contains(loop) and not loop.contains(r)]
        edges = [r for r in edges if any(r.contains(other) for other in schedule.loops)]
        own = set(range(parent.start, parent.stop)) - set(range(loop.start, loop.stop))
        for region in edges:
            own -= set(range(region.start, region.stop))
        item_cycles = cycles([schedule.bundles[i] for i in sorted(own)], timing)
    return Roofline(
        bundles=len(steady),
        cycles=cycles(steady, timing),
        dma_bytes=sum(op.dma_bytes_to_vmem for bundle in steady for op in bundle.operations),
        item_cycles=item_cycles,
    )
