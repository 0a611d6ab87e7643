"""One benchmark of one server, from finding out its model to the summary."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from jaxkv.bench.events import Outcome
from jaxkv.bench.http_client import HttpClient
from jaxkv.bench.load import send_all
from jaxkv.bench.report import Conditions, summarize
from jaxkv.bench.workload import BenchmarkError, make_prompts, request_body


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What to send where. model None: the first that /v1/models tells. vocab: token ids are drawn from this range.

    request_rate: requests per second (a Poisson process), infinity = all at once. max_concurrency None: no limit.
    """

    base_url: str
    endpoint: str = "/v1/completions"
    model: str | None = None
    api_key: str | None = None
    num_prompts: int = 96
    input_len: int = 128
    output_len: int = 64
    request_rate: float = float("inf")
    max_concurrency: int | None = None
    ignore_eos: bool = False
    seed: int = 0
    vocab: tuple[int, int] = (300, 30_000)


def run(benchmark: Benchmark) -> tuple[dict[str, Any], list[Outcome]]:
    """The summary (see `report.summarize`) and each request's outcome.

    Raises BenchmarkError or ServerGoneError when the server cannot be measured at all.
    """
    import uvloop

    return asyncio.run(_run(benchmark), loop_factory=uvloop.new_event_loop)


async def _run(benchmark: Benchmark) -> tuple[dict[str, Any], list[Outcome]]:
    client = HttpClient(benchmark.base_url, api_key=benchmark.api_key)
    try:
        model = benchmark.model or await served_model(client)
        prompts = await make_prompts(
            client,
            benchmark.endpoint,
            model,
            benchmark.num_prompts,
            benchmark.input_len,
            vocab=benchmark.vocab,
            seed=benchmark.seed,
        )
        bodies = [
            request_body(benchmark.endpoint, model, prompt, benchmark.output_len, ignore_eos=benchmark.ignore_eos)
            for prompt in prompts
        ]
        outcomes, duration = await send_all(
            client,
            benchmark.endpoint,
            bodies,
            input_len=benchmark.input_len,
            request_rate=benchmark.request_rate,
            max_concurrency=benchmark.max_concurrency,
            seed=benchmark.seed,
        )
    finally:
        await client.close()
    if all(outcome.error is not None for outcome in outcomes):
        raise BenchmarkError(f"no request succeeded; the first failed with: {outcomes[0].error}")
    conditions = Conditions(
        benchmark.base_url,
        benchmark.endpoint,
        model,
        benchmark.num_prompts,
        benchmark.request_rate,
        benchmark.max_concurrency,
    )
    return summarize(conditions, outcomes, duration), outcomes


async def served_model(client: HttpClient) -> str:
    """The first model of /v1/models. Raises BenchmarkError."""
    answer = await client.get("/v1/models")
    if answer.status in (401, 403):
        raise BenchmarkError(f"GET /v1/models answers HTTP {answer.status}: give the server's key with --api-key")
    if answer.status != 200:
        raise BenchmarkError(f"GET /v1/models answers HTTP {answer.status}: name the model with --model")
    models = answer.json().get("data") or []
    if not models:
        raise BenchmarkError("GET /v1/models lists no model: name one with --model")
    name: str = models[0]["id"]
    return name
