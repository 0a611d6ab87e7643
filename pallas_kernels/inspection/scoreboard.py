"""Cycles of a stretch of a TPU schedule: one per bundle, plus the stalls where a result is popped before it is ready.

The core issues in order. The matrix, cross-lane and transcendental units return results through queues, and the core
stands still when it pops one too early; the compiler's schedule does not show those cycles as empty bundles. The
latencies here were fitted to the compiler's own estimate of small probes and agree with its total within 10 percent;
DMA latency and bank conflicts of VMEM are not modelled.
"""

import collections
import dataclasses
import re

from pallas_kernels.absent_devices import CHIPS
from pallas_kernels.inspection.llo_bundles import Bundle


@dataclasses.dataclass(frozen=True)
class CoreTiming:
    """Latencies and occupancies in cycles. clock_hz is inferred from the published peak FLOP/s."""

    hbm_rate: float  # bytes per second
    clock_hz: float
    matmul_latency: int
    cross_lane_latency: int
    results_per_matmul: int  # result pops of one 8-row (32-bit) matmul; a packed one returns twice as many
    matmul_cycles: int  # an 8-row matmul occupies its unit this long; a packed one twice as long
    cross_lane_cycles: int
    push_cycles: int = 4
    transpose_cycles: int = 8
    transcendental_latency: int = 6
    bounds_check: int = 3

    @property
    def bytes_per_cycle(self) -> float:
        """Of HBM."""
        return self.hbm_rate / self.clock_hz


TIMINGS = {
    "v5e": CoreTiming(
        hbm_rate=CHIPS["v5e"].hbm_rate,
        clock_hz=1.5e9,
        matmul_latency=125,
        cross_lane_latency=115,
        results_per_matmul=1,
        matmul_cycles=8,
        cross_lane_cycles=8,
    ),
    "v6e": CoreTiming(
        hbm_rate=CHIPS["v6e"].hbm_rate,
        clock_hz=1.75e9,
        matmul_latency=192,
        cross_lane_latency=137,
        results_per_matmul=2,
        matmul_cycles=4,
        cross_lane_cycles=4,
        push_cycles=2,
    ),
}

_UNIT = re.compile(r"(mxu|xlu)\d")


def _unit(name: str) -> str:
    match = _UNIT.search(name)
    return match.group(0) if match else ""


def matmul_unit_and_cycles(name: str, timing: CoreTiming) -> tuple[str, int]:
    """The unit that a `vmatmul` goes to, and how long it occupies it."""
    return _unit(name), _rows_of_8(name) * timing.matmul_cycles


def _rows_of_8(name: str) -> int:
    """Of a matmul's operand: packed ones have 16 rows in a register."""
    return 1 if ".f32" in name or ".s32" in name else 2


def cycles(bundles: tuple[Bundle, ...] | list[Bundle], timing: CoreTiming) -> int:
    """Cycles to issue `bundles` once, in order, starting from idle units."""
    now = 0
    ready: dict[str, int] = {}
    results: dict[str, collections.deque[int]] = collections.defaultdict(collections.deque)
    free: dict[str, int] = collections.defaultdict(int)
    for bundle in bundles:
        start = now
        for op in bundle.operations:
            name = op.name
            unit = _unit(name)
            if name.startswith(("vpop.f32.mrf", "vpop.s32.mrf")):
                if results[unit]:
                    start = max(start, results[unit].popleft())
            elif name.startswith("vpop") and op.sources:
                start = max(start, ready.get(op.sources[-1], 0))
            elif name.startswith(("vmatpush", "vmatprep.subr")):
                start = max(start, free[f"{unit}.push"])
            elif name.startswith("vmatmul"):
                start = max(start, free[f"{unit}.matmul"])
            elif unit.startswith("xlu"):
                start = max(start, free[unit])
        for op in bundle.operations:
            name = op.name
            unit = _unit(name)
            if name.startswith("vmatpush"):
                free[f"{unit}.push"] = start + timing.push_cycles
            elif name.startswith("vmatmul"):
                free[f"{unit}.matmul"] = start + matmul_unit_and_cycles(name, timing)[1]
                results[unit].extend([start + timing.matmul_latency] * (_rows_of_8(name) * timing.results_per_matmul))
            elif unit.startswith("xlu") and not name.startswith("vpop"):
                busy = timing.transpose_cycles if "xpose" in name else timing.cross_lane_cycles
                free[unit] = start + busy
                if op.dest:
                    ready[op.dest] = start + timing.cross_lane_latency
            elif op.dest and name.split(".")[0] in (
                "vexp2",
                "vpow2",
                "vlog2",
                "vrcp",
                "vrsqrt",
                "vtanh",
                "vsigmoid",
                "verf",
            ):
                ready[op.dest] = start + timing.transcendental_latency
            elif name.startswith("shalt"):
                start += timing.bounds_check
        now = start + 1
    return now
