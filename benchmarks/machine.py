"""What one has to know of a machine to compare its numbers with another's."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("jaxkv", "jax", "jaxlib", "numpy", "fastapi", "uvicorn")


def conditions() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
        "load_average": list(os.getloadavg()),
    }


def print_conditions(found: dict[str, Any]) -> None:
    for name, value in found.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name.replace('_', ' ') + ':':<20} {shown}")


def cpus() -> list[int]:
    """The numbers of the CPUs that this process, and what it starts, may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cores() -> int:
    return len(cpus())


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    return cpuinfo.exists() and "amx_tile" in cpuinfo.read_text(encoding="utf-8")


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "source tree"
