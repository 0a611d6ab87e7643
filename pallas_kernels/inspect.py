"""Compiles a kernel for a chip that is not here and says what the compiler made of it:

    python -m pallas_kernels.inspect --chip v5e h100 --op ragged_paged_attention --dtype bfloat16 int8

Needs `pip install 'jaxkv[aot]'`, no chip and no driver. Per call: its FLOPs, its bytes, and the time that these need at least on that
chip. Per TPU kernel: VMEM, spills, and of its steady loop the bundles, cycles with stalls, bytes copied, and the static roofline.
Per NVIDIA kernel: registers, spills, shared memory, and how often it multiplies by wgmma, copies by TMA, and touches local memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.absent_devices import CHIPS, why_unavailable
from pallas_kernels.inspection.calls import OPS, Shape
from pallas_kernels.inspection.tpu_kernels import TPUKernel, tpu_kernels
from pallas_kernels.kv_layout import QUANTIZED_DTYPES

_POOL = ("dtype", "page", "static_scales", "num_kv_heads", "head_dim", "seqs")
READS: dict[str, tuple[str, ...]] = {
    "ragged_paged_attention": (*_POOL, "num_heads", "context", "queries"),
    "flash_attention": ("dtype", "num_heads", "num_kv_heads", "head_dim", "seqs", "context"),
    "kv_write": (*_POOL, "num_heads", "tokens"),
    "page_copy": (*_POOL, "num_heads", "tokens"),
    "quantized_matmul": ("kind", "tokens", "outputs", "inputs"),
}
"""The fields of a shape that an op depends on."""


@dataclasses.dataclass(frozen=True)
class Inspection:
    """problem: why it did not compile, None if it did. floor_us: of the call on the chip; bound: what that floor comes from."""

    chip: str
    op: str
    shape: Shape
    problem: str | None = None
    flops: float = 0
    bytes: float = 0
    floor_us: float = 0
    bound: str = ""
    temporary_bytes: int = 0
    tpu: tuple[TPUKernel, ...] = ()
    nvidia: tuple[dict[str, Any], ...] = ()


def inspect_call(chip: str, op: str, shape: Shape) -> Inspection:
    """Compiles one call in a process of its own. Raises RuntimeError where nothing can be compiled for the chip."""
    if reason := why_unavailable(chip):
        raise RuntimeError(f"cannot compile for {chip}: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        arguments = [chip, op, json.dumps(dataclasses.asdict(shape))]
        command = [sys.executable, "-m", "pallas_kernels.inspection.compile_call", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            return Inspection(chip, op, shape, problem=lines[-1] if lines else f"exit status {done.returncode}")
        said = json.loads(done.stdout.splitlines()[-1])
        on_tpu = CHIPS[chip].platform == "tpu"
        kernels = tuple(tpu_kernels(Path(folder), chip)) if on_tpu else ()
    floor, bound = _floor(chip, said["flops"], said["bytes"], said["products"])
    return Inspection(
        chip, op, shape, None, said["flops"], said["bytes"], floor, bound, said["temporary_bytes"], kernels,
        tuple(said["kernels"]),
    )  # fmt: skip


def _floor(chip: str, flops: float, moved: float, products: str) -> tuple[float, str]:
    """Microseconds, and whether bytes or FLOPs set them."""
    kind = CHIPS[chip]
    rate = kind.flops if products == "bfloat16" else kind.flops8
    seconds = {"bytes": moved / kind.hbm_rate, "flops": flops / rate}
    bound = max(seconds, key=lambda name: seconds[name])
    return seconds[bound] * 1e6, bound


def describe(inspection: Inspection) -> str:
    """A few lines: the call, then a row for each kernel."""
    shape, defaults = dataclasses.asdict(inspection.shape), dataclasses.asdict(Shape())
    kinds = ("dtype", "kind")
    shown = [name for name in READS[inspection.op] if name in kinds or shape[name] != defaults[name]]
    title = " ".join([inspection.chip, inspection.op, *(f"{name}={shape[name]}" for name in shown)])
    if inspection.problem:
        return f"{title}\n  does not compile: {inspection.problem}"
    head = (
        f"{title}\n  compiled; {inspection.flops:.3g} FLOPs, {inspection.bytes:.3g} bytes, at least "
        f"{inspection.floor_us:.1f} us (by its {inspection.bound}); {inspection.temporary_bytes / 2**20:.1f} MiB of temporaries"
    )
    rows = [_tpu_row(kernel) for kernel in inspection.tpu] + [_nvidia_row(kernel) for kernel in inspection.nvidia]
    return "\n".join([head, *_table(rows)])


def _tpu_row(kernel: TPUKernel) -> dict[str, str]:
    def shown(value: float | None, form: str = "d") -> str:
        return "-" if value is None else format(value, form)

    return {
        "kernel": kernel.name,
        "VMEM MiB": f"{kernel.vmem_bytes / 2**20:.1f}",
        "spills": str(kernel.spills),
        "bundles": str(kernel.bundles),
        "loop bundles": shown(kernel.loop_bundles),
        "loop cycles": shown(kernel.loop_cycles),
        "loop bytes": shown(kernel.loop_bytes),
        "cycles / bytes' cycles": shown(kernel.ratio, ".2f"),
    }


def _nvidia_row(kernel: dict[str, Any]) -> dict[str, str]:
    return {
        "kernel": kernel["name"],
        "registers": str(kernel["registers"]),
        "spill bytes": str(kernel["spill_bytes"]),
        "stack bytes": str(kernel["stack_bytes"]),
        "shared bytes": str(kernel["shared_bytes"]),
        "wgmma": str(kernel["wgmma"]),
        "TMA": str(kernel["tensor_copies"]),
        "local memory": str(kernel["local_instructions"]),
    }


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    if not rows:
        return ["  no kernels of its own: XLA does it all"]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [{name: name for name in rows[0]}, *rows]
    return ["  " + "  ".join(line[name].rjust(width) for name, width in widths.items()) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", nargs="+", choices=sorted(CHIPS), default=["v5e", "v6e", "h100"])
    parser.add_argument("--op", nargs="+", choices=sorted(OPS), default=["ragged_paged_attention"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], help="of the KV pool, or of dense arrays")
    parser.add_argument("--page", nargs="+", type=int, default=[None], help="tokens; the backend's own by default")
    parser.add_argument(
        "--static-scales", action="store_true", help="of a quantized pool: per layer and head, not per token"
    )
    for field in dataclasses.fields(Shape):
        if field.name not in ("dtype", "page", "static_scales"):
            kind = type(field.default)
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    options = vars(parser.parse_args())
    chips, ops, dtypes, pages = (options.pop(name) for name in ("chip", "op", "dtype", "page"))
    static = options.pop("static_scales")
    failed = False
    done = set()
    for chip, op, dtype, page in itertools.product(chips, ops, dtypes, pages):
        dtype, page = (dtype if "dtype" in READS[op] else Shape.dtype), (page if "page" in READS[op] else None)
        if (chip, op, dtype, page) in done:
            continue
        done.add((chip, op, dtype, page))
        shape = Shape(dtype=dtype, page=page, static_scales=static and dtype in QUANTIZED_DTYPES, **options)
        inspection = inspect_call(chip, op, shape)
        failed |= inspection.problem is not None
        print(describe(inspection), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
