"""What libtpu's dump says about every Pallas kernel of a program."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from pallas_kernels.inspection.llo_bundles import find_schedule, parse_schedule
from pallas_kernels.inspection.roofline import RATES, roofline
from pallas_kernels.inspection.scoreboard import TIMINGS


@dataclasses.dataclass(frozen=True)
class TPUKernel:
    """spills, fills: vector registers to VMEM and back, in the whole kernel. loop_*: of one pass of the steady loop, with stalls; None
    where the kernel has no loop that copies and multiplies, or the chip's timings are not known. ratio: loop_cycles over the
    cycles that loop_bytes take at the chip's HBM rate: below 1, the kernel is bound by memory."""

    name: str
    vmem_bytes: int
    spills: int
    fills: int
    bundles: int
    loop_bundles: int | None = None
    loop_cycles: int | None = None
    loop_bytes: int | None = None
    ratio: float | None = None


def tpu_kernels(dump: Path, chip: str) -> list[TPUKernel]:
    """Reads the dump of one program. Raises ValueError if it holds no profile of the program."""
    profiles = list(dump.glob("*TLP*-hlo-static-bundle-profile.txt"))
    if len(profiles) != 1:
        raise ValueError(f"{dump} holds {len(profiles)} program profiles, one is needed: dump into a fresh directory")
    kernels = {}
    for section in profiles[0].read_text().split("HLO: ")[1:]:
        found = re.match(r"%([\w.-]+?)(\.\d+)? = \S.* custom-call\(", section.split("\n", 1)[0])
        if found and (kernel := _kernel(dump, chip, found[1], section)):
            kernels[kernel.name] = kernel
    return list(kernels.values())


def _kernel(dump: Path, chip: str, name: str, section: str) -> TPUKernel | None:
    try:
        path = find_schedule(dump, name)
    except FileNotFoundError:
        return None  # XLA's own custom calls have no schedule of their own
    schedule = parse_schedule(path)
    counts = {key: int(used) for key, used in re.findall(r"- (\w+): \((\d+)/\d+\)", section)}
    used = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', section)
    kernel = TPUKernel(
        name,
        vmem_bytes=int(used[1]) if used else 0,
        spills=counts["VMEM_SPILL_COUNT"],
        fills=counts["VMEM_FILL_COUNT"],
        bundles=len(schedule.bundles),
    )
    if chip not in TIMINGS:
        return kernel
    try:
        steady = roofline(schedule, TIMINGS[chip])
    except ValueError:
        return kernel
    return dataclasses.replace(
        kernel,
        loop_bundles=steady.bundles,
        loop_cycles=steady.cycles,
        loop_bytes=steady.dma_bytes,
        ratio=steady.ratio(RATES[chip]),
    )
