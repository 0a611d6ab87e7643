"""Servers in turn, one at a time, several rounds: each turn is a server started anew, loaded at every concurrency, and stopped."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.servers import Server, running
from jaxkv.bench.events import Outcome
from jaxkv.bench.report import report_lines
from jaxkv.bench.serving import Benchmark, run
from jaxkv.bench.workload import BenchmarkError

WARM_UP: dict[str, Any] = {"num_prompts": 8, "max_concurrency": 8, "output_len": 16}
WARM_UP_SEED = 1_000_000
LEAST_PROMPTS = 12
PROMPTS_PER_SLOT = 6


@dataclass(frozen=True, slots=True)
class Load:
    """Each request has input_len prompt tokens, drawn from the ids in vocab, and output_len output tokens; num_prompts: of a run, at most."""

    concurrencies: tuple[int, ...] = (1, 8, 32)
    num_prompts: int = 96
    input_len: int = 128
    output_len: int = 64
    vocab: tuple[int, int] = (300, 30_000)

    def prompts_at(self, concurrency: int) -> int:
        """Fewer where they come one after the other: a run of each concurrency takes about the same time."""
        return max(concurrency, min(self.num_prompts, max(LEAST_PROMPTS, PROMPTS_PER_SLOT * concurrency)))


def turns(servers: Sequence[Server], rounds: int) -> Iterator[tuple[int, Server]]:
    """Every server once, then every server again: what slows the machine for a while slows all of them."""
    return ((number, server) for number in range(1, rounds + 1) for server in servers)


def seed_of(number: int, concurrency: int) -> int:
    """The same for every server, so all get the same prompts; no two runs of a server share any, so no cache helps."""
    return 1000 * number + concurrency


def measure_turn(number: int, server: Server, load: Load, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Starts, warms up, measures and stops a server. Raises BenchmarkError where the work done is not the work asked for."""
    show(f"\nround {number}: {server.name}")
    before = os.getloadavg()[0]
    with running(server) as (url, seconds):
        show(f"start to ready: {seconds:.1f} s")
        runs = measure_server(server.name, url, number, load, show)
    return {
        "round": number,
        "server": server.name,
        "start_to_ready_s": seconds,
        "load_average_before": before,
        "runs": runs,
    }


def measure_server(
    name: str, url: str, number: int, load: Load, show: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """The summary of a run at each concurrency."""
    plain = Benchmark(base_url=url, input_len=load.input_len, ignore_eos=True, vocab=load.vocab)
    run(dataclasses.replace(plain, seed=WARM_UP_SEED + number, **WARM_UP))
    runs = []
    for concurrency in load.concurrencies:
        benchmark = dataclasses.replace(
            plain,
            num_prompts=load.prompts_at(concurrency),
            output_len=load.output_len,
            max_concurrency=concurrency,
            seed=seed_of(number, concurrency),
        )
        summary, outcomes = run(benchmark)
        check(name, outcomes, load)
        show("\n".join(report_lines(summary)))
        runs.append(summary | {"load_average_after": os.getloadavg()[0]})
    return runs


def check(name: str, outcomes: Sequence[Outcome], load: Load) -> None:
    """Raises BenchmarkError unless every request was answered in full, by the server's own count of tokens."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise BenchmarkError(f"{name}: a request failed: {outcome.error}")
        if not outcome.counted:
            raise BenchmarkError(f"{name} does not tell how many tokens it read and wrote, so nothing can be compared")
        for what, found, asked in (
            ("prompt", outcome.prompt_tokens, load.input_len),
            ("output", outcome.output_tokens, load.output_len),
        ):
            if found != asked:
                raise BenchmarkError(f"{name}: a request had {found} {what} tokens instead of {asked}")
