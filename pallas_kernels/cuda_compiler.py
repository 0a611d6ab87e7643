"""The CUDA assembler (ptxas) that compiles the Mosaic GPU kernels here, and whether it is one that miscompiles them.

Versions of CUDA 12.8 and 12.9 before 12.9 update 1 give wrong results for warp-specialized causal attention as FlashAttention-3
and the prefill kernel here schedule it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import jax

_FIRST_WRONG, _FIRST_RIGHT = (12, 8, 0), (12, 9, 86)
"""Versions as ptxas says them: V12.9.86 is that of CUDA 12.9 update 1."""
_WHEELS = ("cuda_nvcc", "cu13")
"""Folders of `nvidia` that NVIDIA's packages for CUDA 12 and 13 put it in."""


class CudaCompilerError(RuntimeError):
    """The kernels cannot be compiled right on this machine; the message is one line that says why, and what to install."""


def check() -> None:
    """Raises CudaCompilerError if the kernels would be miscompiled, or on a GPU cannot be compiled. A CPU only interprets them."""
    ptxas = find_ptxas()
    if ptxas is None:
        if jax.default_backend() == "gpu":
            raise CudaCompilerError(
                "no ptxas was found in PATH, /usr/local/cuda or NVIDIA's Python packages: "
                "install one, for example with `pip install 'nvidia-cuda-nvcc-cu12>=12.9.86'`"
            )
        return
    version = version_of(ptxas)
    if version is not None and _FIRST_WRONG <= version < _FIRST_RIGHT:
        raise CudaCompilerError(
            f"{ptxas} is of CUDA V{'.'.join(map(str, version))}, which miscompiles causal attention: install CUDA 12.9 update 1 or "
            "later, for example with `pip install 'nvidia-cuda-nvcc-cu12>=12.9.86'`, and have no older ptxas in PATH"
        )


def find_ptxas() -> Path | None:
    """Where JAX's Mosaic GPU compiler looks, in its order: PATH, /usr/local/cuda, NVIDIA's Python packages."""
    in_path = shutil.which("ptxas")
    candidates = [Path(in_path)] if in_path else []
    candidates.append(Path("/usr/local/cuda/bin/ptxas"))
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        candidates += [Path(folder) / wheel / "bin" / "ptxas" for wheel in _WHEELS]
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def version_of(ptxas: Path) -> tuple[int, int, int] | None:
    """(major, minor, build); None if it does not say."""
    try:
        said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"V(\d+)\.(\d+)\.(\d+)", said)
    if found is None:
        return None
    major, minor, build = map(int, found.groups())
    return major, minor, build
