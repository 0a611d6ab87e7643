"""Compiles for an H100 on a machine without one, and reads what the compiler says about each Mosaic GPU kernel."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.absent_devices import compile_for


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What ptxas says about one kernel, and what its PTX holds.

    shared_bytes: of a thread block. local_instructions: loads and stores of local memory, spills not counted. serialized: ptxas
    gave up the asynchrony of `wgmma` (C7513 and kin).
    """

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    local_instructions: int
    wgmma: int
    tensor_copies: int
    bulk_copies: int
    serialized: bool


def compile_for_h100(
    function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
) -> tuple[Any, list[KernelReport]]:
    """Compiles `function` for arguments like `args` (arrays or shapes); returns it with a report on each Mosaic kernel
    in it."""
    jax.clear_caches()  # a kernel that was lowered before leaves no report
    with tempfile.TemporaryDirectory() as folder, _dumping_to(folder):
        compiled = compile_for("h100", function, *args, donate=donate)
        reports = [_report(ptx) for ptx in sorted(Path(folder).glob("*.ptx"))]
    return compiled, reports


@contextmanager
def _dumping_to(folder: str) -> Iterator[None]:
    wanted = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _report(ptx: Path) -> KernelReport:
    text = ptx.read_text()
    name = re.sub(r"_\d+$", "", ptx.stem)
    said = "\n".join(
        path.read_text() for path in ptx.parent.glob(f"{ptx.stem}*") if "ptxas" in path.name or "resources" in path.name
    )

    def number(pattern: str) -> int:
        found = re.search(pattern, said)
        if found is None:
            raise ValueError(f"ptxas' report on {ptx.stem} does not say {pattern!r}:\n{said}")
        return int(found.group(1))

    return KernelReport(
        name=name,
        registers=number(r"Used (\d+) registers"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared_bytes=_dynamic_shared_bytes(_module(ptx, name)),
        local_instructions=len(re.findall(r"\b(?:ld|st)\.local\b", text)),
        wgmma=text.count("wgmma.mma_async"),
        tensor_copies=text.count("cp.async.bulk.tensor"),
        bulk_copies=text.count("cp.async.bulk.shared"),
        serialized="instructions are serialized" in said,
    )


def _module(ptx: Path, name: str) -> str:
    """The module that a kernel was lowered to. Kernels are numbered when they are lowered, and anew as they are compiled, in any order."""
    modules = [
        path
        for path in ptx.parent.glob(f"{name}_*.before_layout_inference.txt")
        if re.fullmatch(r"\d+", path.name.split(".")[0].removeprefix(f"{name}_"))
    ]
    own = modules[0] if len(modules) == 1 else ptx.with_name(f"{ptx.stem}.before_layout_inference.txt")
    return own.read_text()


def _dynamic_shared_bytes(module: str) -> int:
    found = re.search(r"dynamic_shared_memory_size %c(\d+)_i32", module)
    if found is None:
        raise ValueError("the kernel's module does not say how much shared memory it is launched with")
    return int(found.group(1))
