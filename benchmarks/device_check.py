"""Checks every kernel on the accelerator that is here, and times it against its floor and against what else is installed.

    python benchmarks/device_check.py [--budget 440] [--out FILE]

Parity first: each backend kernel against plain XLA in float32 on the CPU. Then times, best of several rounds of 16 calls in one
program, beside the microseconds that the call's bytes or FLOPs need on this chip. Past the budget (seconds) what is left is listed as left
out. The table comes last; the JSON goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_cases import REPEATS, make, repeated
from benchmarks.device_rivals import Timed, rivals
from pallas_kernels.absent_devices import CHIPS, Chip
from pallas_kernels.backends import Backend, best_for
from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.inspection.calls import Shape, layout_of
from pallas_kernels.kv_layout import KVPages
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.page_copy.api import copy_pages
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.ragged_paged_attention.api import prepare, ragged_paged_attention

ROUNDS = 5
KINDS = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v5": "v5p", "TPU v6 lite": "v6e",
    "TPU v6e": "v6e", "H100": "h100", "H200": "h200",
}  # fmt: skip
PARITY_LIMIT = {"float32": 1e-4, "bfloat16": 1.5e-2}
"""Relative norm of the difference; 8-bit pools are compared with what they hold, so that only bfloat16 rounding is left."""

SMALL = Shape(seqs=5, context=300, queries=3, num_heads=8, num_kv_heads=2, tokens=24, outputs=512, inputs=512)
LLAMA = Shape()
POOLS = ("bfloat16", "int8", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class Case:
    op: str
    name: str
    shape: Shape


def parity_cases() -> list[Case]:
    cases = [
        Case("ragged_paged_attention", f"{dtype} D{dim} q{queries}",
             dataclasses.replace(SMALL, dtype=dtype, head_dim=dim, queries=queries))
        for dtype in POOLS for dim in (64, 128) for queries in (1, 70)
    ]  # fmt: skip
    cases += [
        Case(op, dtype, dataclasses.replace(SMALL, dtype=dtype)) for op in ("kv_write", "page_copy") for dtype in POOLS
    ]
    cases += [Case("flash_attention", f"D{dim}", dataclasses.replace(SMALL, head_dim=dim)) for dim in (64, 128)]
    cases += [
        Case("quantized_matmul", kind, dataclasses.replace(SMALL, kind=kind)) for kind in ("int8", "fp8_e4m3", "int4")
    ]
    return cases


def timed_cases(shape: Shape) -> list[Case]:
    def changed(**changes: Any) -> Shape:
        return dataclasses.replace(shape, **changes)

    few = max(shape.seqs // 8, 1)
    return [
        *(Case("ragged_paged_attention", f"decode, {dtype}", changed(dtype=dtype)) for dtype in POOLS),
        *(Case("ragged_paged_attention", f"prefill, {dtype}", changed(dtype=dtype, seqs=few, queries=shape.context)) for dtype in POOLS),
        Case("flash_attention", "causal", changed(seqs=few, queries=shape.context)),
        *(Case("quantized_matmul", f"{kind}, {tokens} rows", changed(kind=kind, tokens=tokens))
          for kind in ("int8", "fp8_e4m3", "int4") for tokens in (shape.tokens, shape.tokens * 32)),
        *(Case("kv_write", dtype, changed(dtype=dtype)) for dtype in POOLS),
        *(Case("page_copy", dtype, changed(dtype=dtype)) for dtype in POOLS),
    ]  # fmt: skip


def check(case: Case, backend: Backend) -> dict[str, Any]:
    """Relative norm of the difference between the kernel here and XLA in float32 on the CPU."""
    call, args = make(case.op, case.shape, backend)
    cpu = jax.devices("cpu")[0]
    held = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), cpu), args)
    out = jax.jit(call.function)(*args)
    with jax.default_device(cpu), jax.default_matmul_precision("float32"):
        expected = jax.jit(_reference(case, backend))(*held)
    error = max(_distance(a, b) for a, b in zip(_numbers(out), _numbers(expected), strict=True))
    return {"error": error, "limit": PARITY_LIMIT["bfloat16"], "passed": bool(error < PARITY_LIMIT["bfloat16"])}


def _reference(case: Case, backend: Backend) -> Any:
    """The op on the pool layout of `backend`, by XLA."""
    layout = layout_of(case.shape, backend)
    scale = case.shape.head_dim**-0.5
    table: dict[str, Any] = {
        "ragged_paged_attention": lambda q, kv, *tables: ragged_paged_attention(
            q.astype(jnp.float32), kv, *tables, layout=layout, scale=scale
        ),
        "flash_attention": lambda q, k, v: flash_attention(
            *(x.astype(jnp.float32) for x in (q, k, v)), scale=scale, causal=True
        ),
        "kv_write": lambda kv, layer, *rows: write_kv(kv, layer, *rows, layout=layout),
        "page_copy": lambda kv, source, target: copy_pages(kv, source, target, layout=layout, backend="reference"),
        "quantized_matmul": lambda x, weight, layer: quantized_matmul(x, weight, layer=layer),
    }
    return table[case.op]


def _numbers(out: Any) -> list[np.ndarray]:
    if isinstance(out, KVPages) and out.scales is not None and out.scales.ndim != 3:
        return [np.asarray(out.pages, np.float32), np.asarray(out.scales)]
    return [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(out)]


def _distance(actual: np.ndarray, expected: np.ndarray) -> float:
    difference = np.linalg.norm((actual - expected).astype(np.float64))
    return float(difference / max(float(np.linalg.norm(expected.astype(np.float64))), 1e-30))


def seconds_per_call(run: Any) -> float:
    """Of a function that does REPEATS calls and waits: the best of ROUNDS, after one that compiles."""
    run()
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best / REPEATS


def measure(case: Case, backend: Backend, chip: Chip | None) -> dict[str, Any]:
    call, args = make(case.op, case.shape, backend)
    program = repeated(call)
    state = list(args)

    def run() -> None:
        out = jax.block_until_ready(program(*state))
        if call.donate:
            state[0] = out

    row: dict[str, Any] = {"us": seconds_per_call(run) * 1e6, "flops": call.flops, "bytes": call.bytes}
    if chip is not None:
        rate = chip.flops if call.products == "bfloat16" else chip.flops8
        row["floor_us"] = max(call.bytes / chip.hbm_rate, call.flops / rate) * 1e6
        row["of_floor"] = row["floor_us"] / row["us"]
    del state[:], args
    row["rivals_us"] = {}
    for name, rival in rivals(case.op, jax.devices()[0].platform).items():
        row["rivals_us"][name] = _attempt(functools.partial(_time_rival, rival, case.shape))
    return row


def _time_rival(rival: Callable[[Shape], Timed], shape: Shape) -> float:
    return seconds_per_call(rival(shape)) * 1e6


def _attempt(work: Any) -> Any:
    """What work gives, or in one line why it gave nothing: a kernel that fails must not end the checks of the others."""
    try:
        return work()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=440.0, help="seconds")
    parser.add_argument("--backend", help="instead of the best for the device")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--small", action="store_true", help="small shapes: a check of this script, not of a device")
    options = parser.parse_args()
    started = time.monotonic()
    device = jax.devices()[0]
    backend: Backend = options.backend or best_for(device.platform, device.device_kind)[0]
    prepare(backend)
    chip = next((CHIPS[chip] for kind, chip in KINDS.items() if kind in device.device_kind), None)
    report: dict[str, Any] = {
        "device": device.device_kind,
        "backend": backend,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
        "parity": {}, "times": {}, "left_out": [],
    }  # fmt: skip
    work = [("parity", case) for case in parity_cases()]
    work += [("times", case) for case in timed_cases(SMALL if options.small else LLAMA)]
    for part, case in work:
        name = f"{case.op}: {case.name}"
        if time.monotonic() - started > options.budget:
            report["left_out"].append(f"{part} of {name}")
            continue
        work_of = (
            functools.partial(check, case, backend)
            if part == "parity"
            else functools.partial(measure, case, backend, chip)
        )
        report[part][name] = _attempt(work_of)
        print(f"{time.monotonic() - started:6.1f} s  {part} of {name}", flush=True)
    report["seconds"] = time.monotonic() - started
    out = (
        options.out or Path(__file__).parent / "results" / f"device-{device.device_kind.lower().replace(' ', '-')}.json"
    )
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(summary(report)))
    print(f"written to {out}")


def summary(report: dict[str, Any]) -> list[str]:
    """The table: what failed or differs by name, then a row for each time."""
    lines = [f"{report['device']}, backend {report['backend']}, {report['seconds']:.0f} s"]
    wrong = {name: row for name, row in report["parity"].items() if not row.get("passed")}
    lines.append(f"parity: {len(report['parity']) - len(wrong)} of {len(report['parity'])} pass")
    lines += [f"  {name}: {row.get('failed') or row['error']}" for name, row in wrong.items()]
    lines.append(f"{'us':>10}  {'of floor':>8}  kernel; others in us")
    for name, row in report["times"].items():
        if "failed" in row:
            lines.append(f"{'-':>10}  {'-':>8}  {name}: {row['failed']}")
            continue
        share = f"{row['of_floor']:.0%}" if "of_floor" in row else "-"
        others = ", ".join(
            f"{rival} {took:.1f}" if isinstance(took, float) else f"{rival} -"
            for rival, took in row["rivals_us"].items()
        )
        lines.append(f"{row['us']:10.1f}  {share:>8}  {name}{'; ' + others if others else ''}")
    lines += [f"left out: {name}" for name in report["left_out"]]
    return lines


if __name__ == "__main__":
    main()
