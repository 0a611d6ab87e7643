"""Static roofline of the TPU attention kernels: `python -m pallas_kernels.inspection.tpu --chip v5e --page 16 128`.

Each configuration is compiled in a process of its own (the compiler dumps one program per directory) for a chip that need not
be here, and its schedule is read. Needs libtpu.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from pallas_kernels.inspection.llo_bundles import find_schedule, parse_schedule
from pallas_kernels.inspection.roofline import RATES, Roofline, roofline
from pallas_kernels.inspection.scoreboard import TIMINGS, cycles
from pallas_kernels.kv_layout import QUANTIZED_DTYPES

DECODE_KERNEL = "ragged_paged_attention_decode"


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of ragged paged attention: `seqs` decodes with `context` tokens each. The defaults are Llama-3-8B's."""

    chip: str = "v5e"
    page: int = 128
    dtype: str = "bfloat16"
    scales: str | None = None
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    seqs: int = 64
    context: int = 2048
    block_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler made of a shape.

    total_cycles: the scoreboard's count of the whole kernel, every bundle once; compiler_cycles: the compiler's own.
    """

    shape: Shape
    block_tokens: int
    roofline: Roofline
    vmem_bytes: int
    spills: int
    fills: int
    total_cycles: int
    compiler_cycles: int

    @property
    def block_ratio(self) -> float:
        """Cycles of the steady loop per KV token over those of its copies."""
        return self.roofline.ratio(RATES[self.shape.chip])

    @property
    def ratio(self) -> float:
        """The same with the cycles around the loop, spread over the sequence's blocks."""
        return self.roofline.ratio(RATES[self.shape.chip], self.shape.context / self.block_tokens)

    @property
    def bytes_per_token(self) -> float:
        return self.roofline.dma_bytes / self.block_tokens


def inspect_decode(shape: Shape) -> Report:
    """Compiles the decode kernel for `shape` and reads its schedule."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
        }
        command = [sys.executable, "-m", "pallas_kernels.inspection.tpu_compile", json.dumps(dataclasses.asdict(shape))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shape} does not compile:\n{done.stderr[-2000:]}")
        compiled = json.loads(done.stdout.splitlines()[-1])
        schedule = parse_schedule(find_schedule(Path(folder), DECODE_KERNEL))
        spills, fills, compiler_cycles = _compiler_profile(Path(folder))
        timing = TIMINGS[shape.chip]
        return Report(
            shape=shape,
            block_tokens=compiled["block_tokens"],
            roofline=roofline(schedule, timing),
            vmem_bytes=_scoped_vmem(Path(folder)),
            spills=spills,
            fills=fills,
            total_cycles=cycles(schedule.bundles, timing),
            compiler_cycles=compiler_cycles,
        )


def _compiler_profile(dump: Path) -> tuple[int, int, int]:
    """Spills, fills and cycles of the kernel from the compiler's static profile (two scalar slots per cycle)."""
    (profile,) = dump.glob("*TLP*-hlo-static-bundle-profile.txt")
    for section in profile.read_text().split("HLO: ")[1:]:
        if section.startswith(f"%{DECODE_KERNEL}"):
            counts = {
                name: (int(used), int(slots)) for name, used, slots in re.findall(r"- (\w+): \((\d+)/(\d+)\)", section)
            }
            return counts["VMEM_SPILL_COUNT"][0], counts["VMEM_FILL_COUNT"][0], counts["SCALAR_ALU"][1] // 2
    raise ValueError(f"the compiler's profile in {dump} does not mention {DECODE_KERNEL}")


def _scoped_vmem(dump: Path) -> int:
    """Bytes of VMEM that the kernel uses, from the program's text."""
    (profile,) = dump.glob("*TLP*-hlo-static-bundle-profile.txt")
    for section in profile.read_text().split("HLO: ")[1:]:
        if section.startswith(f"%{DECODE_KERNEL}"):
            used = re.search(
                r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', section
            )
            return int(used[1]) if used else 0
    return 0


def table(reports: list[Report]) -> str:
    head = ("chip", "page", "dtype", "scales", "block", "bytes/token", "cycles/token", "ratio", "with item", "VMEM MiB",
            "spills", "scoreboard/compiler")  # fmt: skip
    rows = [head]
    for r in reports:
        rows.append(
            (
                r.shape.chip, str(r.shape.page), r.shape.dtype, r.shape.scales or "-", str(r.block_tokens),
                f"{r.bytes_per_token:.0f}", f"{r.roofline.cycles / r.block_tokens:.2f}", f"{r.block_ratio:.2f}",
                f"{r.ratio:.2f}", f"{r.vmem_bytes / 2**20:.1f}", str(r.spills),
                f"{r.total_cycles / r.compiler_cycles:.2f}",
            )
        )  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def save(reports: list[Report], path: Path) -> None:
    """Puts `reports` in place of the rows of a tuning file, and the versions they rest on; what else stands in it is kept."""
    rows = [
        {
            "chip": r.shape.chip,
            "dtype": r.shape.dtype,
            "scales": r.shape.scales,
            "page": r.shape.page,
            "block": r.block_tokens,
            "ratio": round(r.block_ratio, 2),
            "ratio_with_item": round(r.ratio, 2),
            "bytes_per_token": round(r.bytes_per_token),
            "cycles_per_token": round(r.roofline.cycles / r.block_tokens, 2),
            "vmem_mib": round(r.vmem_bytes / 2**20, 1),
            "spills": r.spills,
        }
        for r in reports
    ]
    kept = json.loads(path.read_text()) if path.exists() else {}
    versions = {name: metadata.version(name) for name in ("jax", "libtpu")}
    text = json.dumps(kept | {"versions": versions, "rows": None}, indent=2)
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    path.write_text(text.replace('"rows": null', f'"rows": [\n{lines}\n  ]') + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", nargs="+", default=["v5e", "v6e"], choices=sorted(RATES))
    parser.add_argument("--page", nargs="+", type=int, default=[16, 32, 128])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float8_e4m3fn", "int8"])
    parser.add_argument(
        "--scales", nargs="+", choices=["static", "token"], default=["static", "token"], help="of quantized pools"
    )
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--block-tokens", nargs="+", type=int, default=[None], help="instead of the kernel's own choice"
    )
    parser.add_argument("--save", type=Path, help="write the rows into this tuning file")
    options = parser.parse_args()
    reports = []
    for chip, dtype, page, block in itertools.product(options.chip, options.dtype, options.page, options.block_tokens):
        for scales in options.scales if dtype in QUANTIZED_DTYPES else [None]:
            shape = Shape(
                chip, page, dtype, scales, options.num_heads, options.num_kv_heads, options.head_dim, block_tokens=block
            )
            reports.append(inspect_decode(shape))
            print(table(reports[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(reports))
    if options.save:
        save(reports, options.save)


if __name__ == "__main__":
    main()
