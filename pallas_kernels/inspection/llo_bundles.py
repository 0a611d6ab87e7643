"""Reads the final VLIW schedule that the TPU compiler dumps for a kernel (`*-final_bundles.txt`).

A bundle is one instruction word: what all units of the core do in one cycle if nothing stalls. The reader keeps the
operations of each bundle, the loops (from backward branches) and the conditional regions (from forward branches).
The format is not documented; every assumption is asserted, so that a new compiler fails loudly instead of miscounting.
"""

import dataclasses
import re
from pathlib import Path

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|\d+)\s*(?:[A-Z]{2})?\s*:\s*([> ]*)\{")
_OPERATION = re.compile(r"^(?:(?P<dest>%[\w]+) = )?(?P<name>[a-z][\w.]*)(?P<rest>.*)$", re.DOTALL)
_START_REGION = re.compile(r"(?:Start region|Start/End empty region) (\d+)")
_BRANCH = re.compile(r"sbr\.rel (?:\((!?%\w+)\) )?target = \$region(\d+)")
_DELAY_SLOTS = 4
_GRANULE_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Operation:
    """One slot of a bundle: `%dest = name operands`."""

    name: str
    dest: str | None
    sources: tuple[str, ...]
    text: str

    @property
    def dma_bytes_to_vmem(self) -> int:
        """Bytes that this operation copies from HBM to VMEM (0 for anything else)."""
        general = self.name == "dma.general" and "hbm-to-vmem" in self.text
        if not general and not self.name.startswith("dma.hbm_to_vmem"):
            return 0
        size = re.search(r"size_in_granules=\*/(%?\w+)", self.text)
        if size is None or not size.group(1).isdigit():
            raise ValueError(f"a DMA without a static size: {self.text[:200]!r}; give the kernel static copy shapes")
        return int(size.group(1)) * _GRANULE_BYTES


@dataclasses.dataclass(frozen=True)
class Bundle:
    address: int
    depth: int
    operations: tuple[Operation, ...]


@dataclasses.dataclass(frozen=True)
class Span:
    """Bundles `[start, stop)` that form a loop body or a region that a branch may skip."""

    start: int
    stop: int

    def contains(self, other: "Span") -> bool:
        return self != other and self.start <= other.start and other.stop <= self.stop

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A kernel's bundles with its loops (outermost first) and its conditional regions."""

    bundles: tuple[Bundle, ...]
    loops: tuple[Span, ...]
    regions: tuple[Span, ...]

    def operations(self, span: Span) -> list[Operation]:
        return [op for bundle in self.bundles[span.start : span.stop] for op in bundle.operations]

    def children(self, loop: Span) -> list[Span]:
        """Loops directly inside `loop`."""
        inside = [other for other in self.loops if loop.contains(other)]
        return [one for one in inside if not any(other.contains(one) for other in inside)]


def _parse_operation(text: str) -> Operation:
    text = text.strip()
    match = _OPERATION.match(text)
    if match is None:
        raise ValueError(f"unknown operation in the schedule: {text[:200]!r}")
    bare = re.sub(r"/\*.*?\*/", " ", match["rest"], flags=re.DOTALL)
    return Operation(match["name"], match["dest"], tuple(re.findall(r"%\w+", bare)), text)


def parse_schedule(path: Path) -> Schedule:
    """Parses one `*-final_bundles.txt`."""
    raw: list[tuple[int, int, str]] = []
    for line in path.read_text().splitlines():
        match = _BUNDLE.match(line)
        if match:
            raw.append((int(match[1], 0), match[2].count(">"), line[match.end() :]))
        elif raw:
            address, depth, body = raw[-1]
            raw[-1] = (address, depth, body + "\n" + line)
    if not raw:
        raise ValueError(f"{path} holds no bundles")
    bundles, region_starts, branches = [], {}, []
    for index, (address, depth, text) in enumerate(raw):
        if address != index:
            raise ValueError(f"{path}: bundle {index} has address {address:#x}; addresses should be dense")
        for region in _START_REGION.findall(text):
            region_starts[int(region)] = address
        body = text[: text.rindex("}")] if "}" in text else text
        operations = [_parse_operation(part) for part in body.split(" ;; ") if part.strip()]
        for op in operations:
            target = _BRANCH.search(op.text)
            if target:
                branches.append((address, int(target[2])))
        bundles.append(Bundle(address, depth, tuple(operations)))

    loops: dict[int, int] = {}
    regions = []
    for address, region in branches:
        target_address = region_starts.get(region)
        if target_address is None:
            raise ValueError(f"{path}: a branch at {address:#x} goes to region {region}, which never starts")
        if target_address <= address:
            loops[target_address] = max(loops.get(target_address, 0), address + _DELAY_SLOTS + 1)
        else:
            regions.append(Span(address + _DELAY_SLOTS + 1, target_address))
    loop_spans = sorted((Span(start, stop) for start, stop in loops.items()), key=lambda span: (span.start, -span.stop))
    return Schedule(
        tuple(bundles), tuple(loop_spans), tuple(region for region in regions if region.stop > region.start)
    )


def find_schedule(dump: Path, kernel: str) -> Path:
    """The final schedule of `kernel` (its `pallas_call` name) in a dump directory."""
    excluded = re.compile(r"TLP|<late|schedule-analysis")
    found = [path for path in dump.glob(f"*-{kernel}*-final_bundles.txt") if not excluded.search(path.name)]
    if not found:
        raise FileNotFoundError(f"no schedule of a kernel named {kernel!r} in {dump}")
    return max(found, key=lambda path: path.stat().st_size)
