"""Sends requests at a rate, no more than so many at once, and measures each."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from typing import Any

from jaxkv.bench.events import Outcome, read_outcome
from jaxkv.bench.http_client import Answer, HttpClient, ServerGoneError


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is due: 0 for an infinite rate, else a Poisson process."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


async def send_all(
    client: HttpClient,
    endpoint: str,
    bodies: Sequence[dict[str, Any]],
    *,
    input_len: int,
    request_rate: float,
    max_concurrency: int | None,
    seed: int,
) -> tuple[list[Outcome], float]:
    """The outcomes in order, and the seconds from the first request to the last answer."""
    gate = asyncio.Semaphore(max_concurrency or max(1, len(bodies)))
    start = time.perf_counter()

    async def send(body: dict[str, Any], due: float) -> Answer | ServerGoneError:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        async with gate:
            try:
                return await client.post(endpoint, body)
            except ServerGoneError as error:
                return error

    due_times = arrival_times(len(bodies), request_rate, seed)
    answers = await asyncio.gather(*(send(*pair) for pair in zip(bodies, due_times, strict=True)))
    duration = time.perf_counter() - start
    # Reading comes after the clock has stopped: it costs more than receiving.
    return [_outcome(answer, input_len) for answer in answers], duration


def _outcome(answer: Answer | ServerGoneError, input_len: int) -> Outcome:
    if isinstance(answer, ServerGoneError):
        return Outcome(error=str(answer))
    return read_outcome(answer, input_len)
