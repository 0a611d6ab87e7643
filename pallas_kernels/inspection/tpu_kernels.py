"""What libtpu's dump says about every Pallas kernel of a program."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pallas_kernels.inspection.llo_bundles import Schedule, find_schedule, parse_schedule
from pallas_kernels.inspection.roofline import Products, Roofline, products, roofline
from pallas_kernels.inspection.scoreboard import TIMINGS, cycles


@dataclass(frozen=True)
class TPUKernel:
    """spills: vector registers to VMEM, in the whole kernel. compiler_cycles: of every bundle once, by the compiler's count; cycles:
    by the scoreboard's, None where the chip's timings are not known. steady: None there too, and where the kernel has no
    loop that copies and multiplies. products: of each stretch of code that multiplies, empty where timings are not known."""

    name: str
    vmem_bytes: int
    spills: int
    bundles: int
    compiler_cycles: int
    cycles: int | None = None
    steady: Roofline | None = None
    products: tuple[Products, ...] = ()


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
        schedule = parse_schedule(find_schedule(dump, name))
    except FileNotFoundError:
        return None  # XLA's own custom calls have no schedule of their own
    counts = {key: (int(used), int(slots)) for key, used, slots in re.findall(r"- (\w+): \((\d+)/(\d+)\)", section)}
    used = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', section)
    timing = TIMINGS.get(chip)
    return TPUKernel(
        name,
        vmem_bytes=int(used[1]) if used else 0,
        spills=counts["VMEM_SPILL_COUNT"][0],
        bundles=len(schedule.bundles),
        compiler_cycles=counts["SCALAR_ALU"][1] // 2,  # two scalar slots per cycle
        cycles=None if timing is None else cycles(schedule.bundles, timing),
        steady=_steady(schedule, chip),
        products=() if timing is None else tuple(products(schedule, timing)),
    )


def _steady(schedule: Schedule, chip: str) -> Roofline | None:
    try:
        return roofline(schedule, TIMINGS[chip])
    except (KeyError, ValueError):
        return None
