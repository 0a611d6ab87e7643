"""Starts the server, loads it over HTTP at several concurrencies, and tells the conditions with the numbers.

    python benchmarks/serving.py [--model M] [--concurrency 1 --concurrency 8 ...]
    python benchmarks/serving.py --against llama.cpp,vllm [--rounds 3] [--output benchmarks/results/serving-against.json]

Each run: 96 requests (more than the concurrency, in any case) of 128 prompt tokens and 64 output tokens, streamed.
Writes benchmarks/results/serving-<date>.json. With --against, jaxkv (bfloat16 and int8) and the peers that `make bench-peers`
installs take turns, one server at a time, each started anew; then medians and ratios are printed, and a PNG is drawn as well.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.against import Load, measure_turn, turns
from benchmarks.comparison import tables
from benchmarks.machine import conditions, print_conditions
from benchmarks.picture import draw
from benchmarks.servers import Server, command_line, jaxkv, jaxkv_variants, peers, running
from jaxkv.bench.report import report_lines
from jaxkv.bench.serving import Benchmark, run
from jaxkv.core.errors import JaxkvError
from jaxkv.weights.catalog import DEFAULT_MODEL

RESULTS = Path(__file__).parent / "results"


def main(
    model: Annotated[str, typer.Option(help="As `jaxkv serve` takes it.")] = DEFAULT_MODEL,
    concurrency: Annotated[list[int] | None, typer.Option(help="May be given several times. [default: 1 8 32]")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests per run; with --against, at most.")] = 96,
    input_len: Annotated[int, typer.Option()] = 128,
    output_len: Annotated[int, typer.Option()] = 64,
    server_option: Annotated[
        list[str] | None, typer.Option(help="Passed on to `jaxkv serve`, e.g. --server-option=--dtype=float32.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="Peers to compare with: llama.cpp,vllm.")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="With --against: turns of each server. [default: 3]")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The JSON to write; a name with the date if not given.")] = None,
) -> None:
    # So that a server which is running ends as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    load = Load(tuple(concurrency or (1, 8, 32)), num_prompts, input_len, output_len)
    path = output or RESULTS / f"serving-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(exist_ok=True)
    try:
        if against is None:
            if rounds is not None:
                raise SystemExit(f"--rounds {rounds} is for comparisons: give --against as well, or leave it out")
            result = measure_alone(model, server_option or [], load)
        else:
            if find_spec("matplotlib") is None:
                raise SystemExit('the picture needs matplotlib: pip install -e ".[notebook]"')
            servers = [*jaxkv_variants(model, server_option or []), *peers(against, model)]
            result = compare(model, servers, rounds or 3, load, path)
            draw(result, path.with_suffix(".png"))
            print("\n".join(["", *tables(result), ""]))
    except JaxkvError as error:
        raise SystemExit(str(error)) from error
    save(result, path)
    print(f"saved to {path}")


def save(result: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure_alone(model: str, options: list[str], load: Load) -> dict[str, Any]:
    """jaxkv at each concurrency, with what its own metrics say."""
    found = {"model": model, "server_options": options, **conditions()}
    print_conditions(found)
    with running(jaxkv(model, options)) as (url, seconds):
        print(f"start to ready: {seconds:.1f} s\n")
        runs = [
            measured(
                Benchmark(
                    base_url=url,
                    num_prompts=max(load.num_prompts, limit),
                    input_len=load.input_len,
                    output_len=load.output_len,
                    max_concurrency=limit,
                    ignore_eos=True,
                    seed=limit,
                )
            )
            for limit in load.concurrencies
        ]
    return {"conditions": found, "start_to_ready_s": seconds, "runs": runs}


def compare(model: str, servers: list[Server], rounds: int, load: Load, path: Path) -> dict[str, Any]:
    """All turns; see `benchmarks.comparison` for how to read the result. What was measured is saved, should a later turn fail."""
    found = {
        "model": model,
        **conditions(),
        "load": {"input_len": load.input_len, "output_len": load.output_len},
        "servers": [
            {"name": server.name, "version": server.version, "weights": server.weights, "command": command_line(server)}
            for server in servers
        ],
    }
    print_conditions({name: value for name, value in found.items() if name != "servers"})
    result: dict[str, Any] = {"conditions": found, "turns": []}
    for number, server in turns(servers, rounds):
        result["turns"].append(measure_turn(number, server, load))
        save(result, path)
    return result


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


if __name__ == "__main__":
    typer.run(main)
