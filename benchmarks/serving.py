"""Starts the server, loads it over HTTP at several concurrencies, and tells the conditions with the numbers.

    python benchmarks/serving.py [--model M] [--concurrency 1 --concurrency 8 ...]

Each run: 96 requests (more than the concurrency, in any case) of 128 prompt tokens and 64 output tokens, streamed.
Writes benchmarks/results/serving-<date>.json.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from prometheus_client.parser import text_string_to_metric_families

from jaxkv.bench.report import report_lines
from jaxkv.bench.serving import Benchmark, run
from jaxkv.weights.catalog import DEFAULT_MODEL
from server.port import bind

RESULTS = Path(__file__).parent / "results"
START_TIMEOUT = 600
PACKAGES = ("jax", "jaxlib", "numpy", "fastapi", "uvicorn")


def main(
    model: Annotated[str, typer.Option(help="As `jaxkv serve` takes it.")] = DEFAULT_MODEL,
    concurrency: Annotated[list[int] | None, typer.Option(help="May be given several times. [default: 1 8 32]")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests per run.")] = 96,
    input_len: Annotated[int, typer.Option()] = 128,
    output_len: Annotated[int, typer.Option()] = 64,
    server_option: Annotated[
        list[str] | None, typer.Option(help="Passed on to `jaxkv serve`, e.g. --server-option=--dtype=float32.")
    ] = None,
) -> None:
    options = server_option or []
    result: dict[str, Any] = {"conditions": conditions(model, options), "runs": []}
    print_conditions(result["conditions"])
    with running_server(model, options) as (url, seconds):
        print(f"start to ready: {seconds:.1f} s\n")
        result["start_to_ready_s"] = seconds
        for limit in concurrency or [1, 8, 32]:
            benchmark = Benchmark(
                base_url=url,
                num_prompts=num_prompts,
                input_len=input_len,
                output_len=output_len,
                max_concurrency=limit,
                ignore_eos=True,
                seed=limit,
            )
            result["runs"].append(measured(benchmark))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"serving-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"saved to {path}")


def measured(benchmark: Benchmark) -> dict[str, Any]:
    """One run: the client's numbers, and what the server's metrics say of the same time."""
    before, load_before = scrape(benchmark.base_url), os.getloadavg()[0]
    summary, _ = run(benchmark)
    after = scrape(benchmark.base_url)
    grown = {name: after[name] - before[name] for name in after}
    busy = grown["step_host_seconds"] + grown["step_device_seconds"]
    seen = {
        "recompilations": grown["recompilations"],
        "preemptions": grown["num_preemptions"],
        "steps": grown["steps"],
        "host_share_of_step": grown["step_host_seconds"] / busy if busy else 0.0,
        "load_average_before": load_before,
        "load_average_after": os.getloadavg()[0],
    }
    print("\n".join(report_lines(summary)))
    for name, value in seen.items():
        print(f"{name.replace('_', ' ') + ':':<40} {value:<10.4g}".rstrip())
    print()
    return summary | seen


def scrape(url: str) -> dict[str, float]:
    """The totals that a run is judged by."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}

    def total(family: str, suffix: str) -> float:
        samples = families[f"jaxkv:{family}"].samples
        return float(sum(sample.value for sample in samples if sample.name == f"jaxkv:{family}_{suffix}"))

    return {
        "recompilations": total("recompilations", "total"),
        "num_preemptions": total("num_preemptions", "total"),
        "steps": total("step_host_seconds", "count"),
        "step_host_seconds": total("step_host_seconds", "sum"),
        "step_device_seconds": total("step_device_seconds", "sum"),
    }


@contextmanager
def running_server(model: str, options: list[str]) -> Iterator[tuple[str, float]]:
    """A server of its own on a free port: its URL, and the seconds from its start until it was ready."""
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "jaxkv", "serve", model, "--port", str(port), *options])
    try:
        while not is_ready(url):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with exit code {process.returncode} before it was ready")
            if time.monotonic() - started > START_TIMEOUT:
                raise SystemExit(f"the server was not ready after {START_TIMEOUT} s")
            time.sleep(0.2)
        yield url, time.monotonic() - started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def conditions(model: str, options: list[str]) -> dict[str, Any]:
    """What one has to know to compare the numbers with others."""
    return {
        "model": model,
        "server_options": options,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in ("jaxkv", *PACKAGES)},
        "load_average": os.getloadavg(),
    }


def print_conditions(found: dict[str, Any]) -> None:
    for name, value in found.items():
        shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name.replace('_', ' ') + ':':<20} {shown}")


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


if __name__ == "__main__":
    typer.run(main)
