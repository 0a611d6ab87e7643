"""Checks every kernel on the accelerator that is here, and times it against its floor and against what else is installed.

    python -m benchmarks.device_check [--budget 440] [--out FILE]

Parity first, for at most 60 % of the budget: each backend kernel against plain XLA in float32 on the CPU. Then times, best of several
rounds of 16 calls in one program, beside the microseconds that the call's bytes or FLOPs need on this chip. Past the budget (seconds)
what is left is listed as left out; a kernel that still hangs 30 s later ends the program. The table comes last; the JSON, in
benchmarks/results/ by default, is written anew after each case. The exit status is 1 if a case fails, if a mistake planted in an output
is taken for right, or if no parity case ran.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from benchmarks.device_cases import (
    LLAMA,
    REPEATS,
    SMALL,
    Case,
    is_read_by,
    make,
    parity_cases,
    repeated,
    timed_cases,
)
from benchmarks.device_parity import check
from benchmarks.device_rivals import Timed, of_interest, rivals
from pallas_kernels.absent_devices import CHIPS, Chip
from pallas_kernels.backends import BACKENDS, Backend, best_for
from pallas_kernels.inspection.calls import Shape
from pallas_kernels.ragged_paged_attention.api import prepare

ROUNDS = 5
PARITY_SHARE = 0.6
"""Of the budget, so that slow compilation of many small calls leaves time for the times."""
GRACE = 30.0
"""Seconds after the budget at which a call that has not ended is taken to hang."""
KINDS = {
    "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5p": "v5p", "TPU v5": "v5p", "TPU v6 lite": "v6e",
    "TPU v6e": "v6e", "H100": "h100", "H200": "h200",
}  # fmt: skip


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
        row["rivals_us"][name] = _time_rival(rival, of_interest(case.shape))
    return row


@functools.cache
def _time_rival(rival: Callable[[Shape], Timed], shape: Shape) -> Any:
    """Microseconds, or why there are none: once for all calls that it is compared with."""
    return _attempt(lambda: seconds_per_call(rival(shape)) * 1e6)


def _attempt(work: Any) -> Any:
    """What work gives, or in one line why it gave nothing: a kernel that fails must not end the checks of the others."""
    try:
        return work()
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}", "passed": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=440.0, help="seconds")
    parser.add_argument("--backend", choices=BACKENDS, help="instead of the best for the device")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--small", action="store_true", help="small shapes: a check of this script, not of a device")
    options = parser.parse_args()
    _keep_cpu()
    device = jax.devices()[0]
    backend: Backend = options.backend or best_for(device.platform, device.device_kind)[0]
    prepare(backend)
    name = f"device-{device.device_kind.lower().replace(' ', '-')}.json"
    out: Path = options.out or Path(__file__).parent / "results" / name
    report: dict[str, Any] = {
        "device": device.device_kind,
        "backend": backend,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib")},
        "seconds": 0.0, "parity": {}, "times": {}, "left_out": [],
    }  # fmt: skip
    watchdog = threading.Timer(options.budget + GRACE, _give_up, (report, out))
    watchdog.daemon = True
    watchdog.start()
    work(report, out, options.budget, SMALL if options.small else LLAMA)
    watchdog.cancel()
    print("\n".join(summary(report)))
    print(f"written to {out}")
    sys.exit(0 if is_sound(report) else 1)


def _keep_cpu() -> None:
    """The CPU beside the devices that JAX_PLATFORMS may name: the expected results are computed there."""
    named = jax.config.jax_platforms
    if named and "cpu" not in named.split(","):
        jax.config.update("jax_platforms", f"{named},cpu")


def work(report: dict[str, Any], out: Path, budget: float, shape: Shape) -> None:
    """Runs all cases on the backend of the report and fills it, with a file after each case; `shape` is that of timed calls."""
    started = time.monotonic()
    chip = next((CHIPS[chip] for kind, chip in KINDS.items() if kind in report["device"]), None)
    out.parent.mkdir(parents=True, exist_ok=True)
    plan: list[tuple[str, Case, Callable[[], Any], float]] = [
        ("parity", case, functools.partial(check, case, report["backend"]), PARITY_SHARE * budget)
        for case in parity_cases()
        if is_read_by(report["backend"], case)
    ]
    plan += [
        ("times", case, functools.partial(measure, case, report["backend"], chip), budget)
        for case in timed_cases(shape)
        if is_read_by(report["backend"], case)
    ]
    for part, case, run, until in plan:
        name = f"{case.op}: {case.name}"
        if time.monotonic() - started > until:
            report["left_out"].append(f"{part} of {name}")
            continue
        report["running"] = f"{part} of {name}"
        report[part][name] = _attempt(run)
        del report["running"]
        report["seconds"] = time.monotonic() - started
        out.write_text(json.dumps(report, indent=2) + "\n")
        print(f"{report['seconds']:6.1f} s  {part} of {name}", flush=True)
    out.write_text(json.dumps(report, indent=2) + "\n")


def _give_up(report: dict[str, Any], out: Path) -> None:
    """Says what there is and ends the process: nothing else ends a call that waits for a device for ever."""
    report["left_out"].append(f"all from {report.get('running')} on: it did not end")
    out.write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(summary(report)), flush=True)
    os._exit(1)


def is_sound(report: dict[str, Any]) -> bool:
    """Whether parity was checked, and all that ran did what it should."""
    parity = report["parity"].values()
    return (
        bool(parity)
        and all(row["passed"] for row in parity)
        and not any("failed" in row for row in report["times"].values())
    )


def why_wrong(row: dict[str, Any]) -> str:
    """Of a parity row that does not pass."""
    if "failed" in row:
        return str(row["failed"])
    said = (
        f"error {row['error']:.2g}, limit {row['limit']:.2g}; {row['stray']} numbers of the pool not as they should be"
    )
    return said + "".join(f"; a planted mistake is not seen: {name}" for name in row["unseen"])


def summary(report: dict[str, Any]) -> list[str]:
    """The table: what failed or differs by name, then a row for each time."""
    lines = [f"{report['device']}, backend {report['backend']}, {report['seconds']:.0f} s"]
    wrong = {name: row for name, row in report["parity"].items() if not row.get("passed")}
    lines.append(f"parity: {len(report['parity']) - len(wrong)} of {len(report['parity'])} pass")
    lines += [f"  {name}: {why_wrong(row)}" for name, row in wrong.items()]
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
