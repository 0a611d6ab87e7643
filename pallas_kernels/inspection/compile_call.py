"""Compiles one call for a chip that is not here, in a process of its own: libtpu dumps what it compiles where the flags of the process
say, one program to a folder."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.absent_devices import CHIPS, compile_for, mesh_of_one, why_unavailable
from pallas_kernels.inspection.calls import OPS, Shape
from pallas_kernels.inspection.nvidia import KernelReport, compile_for_h100
from pallas_kernels.inspection.tpu_kernels import TPUKernel, tpu_kernels


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A call, and what the compiler made of it. problem: why it did not compile, None if it did. flops to block_tokens: of
    `calls.Call`."""

    chip: str
    op: str
    shape: Shape
    problem: str | None = None
    flops: float = 0
    bytes: float = 0
    products: str = "bfloat16"
    block_tokens: int | None = None
    temporary_bytes: int = 0
    kernels: tuple[TPUKernel | KernelReport, ...] = ()

    def floor(self) -> tuple[float, str]:
        """The microseconds that the call needs at least on the chip, and which of bytes and FLOPs they are for."""
        kind = CHIPS[self.chip]
        rate = kind.flops if self.products == "bfloat16" else kind.flops8
        seconds = {"bytes": self.bytes / kind.hbm_rate, "flops": self.flops / rate}
        bound = max(seconds, key=lambda name: seconds[name])
        return seconds[bound] * 1e6, bound


def inspect_call(chip: str, op: str, shape: Shape) -> Inspection:
    """Raises RuntimeError where nothing can be compiled for the chip."""
    if reason := why_unavailable(chip):
        raise RuntimeError(f"cannot compile for {chip}: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags}
        arguments = [chip, op, json.dumps(dataclasses.asdict(shape))]
        command = [sys.executable, "-m", "pallas_kernels.inspection.compile_call", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return Inspection(chip, op, shape, problem=lines[-1] if lines else f"exit status {done.returncode}")
        said = json.loads(done.stdout.splitlines()[-1])
        reports: list[TPUKernel | KernelReport] = [KernelReport(**report) for report in said.pop("reports")]
        if CHIPS[chip].platform == "tpu":
            reports += tpu_kernels(Path(folder), chip)
    return Inspection(chip, op, shape, kernels=tuple(reports), **said)


def _compile(chip: str, op: str, shape: Shape) -> dict[str, Any]:
    """Fields of the inspection, and ptxas' reports. A TPU's kernels are read from the dump by the process that asked for it."""
    on_gpu = CHIPS[chip].platform == "gpu"
    with jax.set_mesh(mesh_of_one(chip)):
        call = OPS[op](shape, "mosaic_gpu" if on_gpu else "mosaic_tpu")
    reports: list[KernelReport] = []
    if on_gpu:
        compiled, reports = compile_for_h100(call.function, *call.args, donate=call.donate)
    else:
        compiled = compile_for(chip, call.function, *call.args, donate=call.donate)
    return {
        "flops": call.flops,
        "bytes": call.bytes,
        "products": call.products,
        "block_tokens": call.block_tokens,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "reports": [dataclasses.asdict(report) for report in reports],
    }


def main() -> None:
    """The process: chip, op and shape as arguments, what `_compile` returns on standard output, all as JSON."""
    try:
        print(json.dumps(_compile(sys.argv[1], sys.argv[2], Shape(**json.loads(sys.argv[3])))))
    except Exception as error:  # whatever the kernel's checks or the compiler raise is what was asked for
        message = str(error).strip().splitlines()
        sys.exit(f"{type(error).__name__}: {message[0] if message else ''}")


if __name__ == "__main__":
    main()
