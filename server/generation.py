"""The engine requests behind one HTTP request: submitted together, read as one stream, aborted together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from jaxkv.core.errors import RequestError
from jaxkv.core.outputs import RequestDelta
from jaxkv.core.sampling_params import SamplingParams
from server.metrics import Metrics
from server.request_metrics import RequestMetrics

if TYPE_CHECKING:
    from jaxkv.engine.async_engine import AsyncEngine
    from jaxkv.engine.request import Request


class Generation:
    """Yields (position of the prompt, delta) until every prompt's request has ended.

    An async context manager: leaving it, for whatever reason, aborts within one step what still runs.
    """

    def __init__(self, engine: AsyncEngine, requests: Sequence[Request]) -> None:
        self.requests = requests
        self._engine = engine
        self._streams: list[AsyncIterator[RequestDelta]] = []
        self._merged: asyncio.Queue[tuple[int, RequestDelta | Exception | None]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._unfinished = len(requests)
        self._metrics: list[RequestMetrics] = []

    @classmethod
    async def submit(cls, engine: AsyncEngine, requests: Sequence[Request], metrics: Metrics) -> Self:
        """Queues all requests, or none: QueueFullError and EngineStoppedError come from here."""
        generation = cls(engine, requests)
        try:
            for request in requests:
                generation._streams.append(engine.submit(request))
                generation._metrics.append(RequestMetrics(metrics, request.params.n))
        except BaseException:
            await generation.close()
            raise
        if len(requests) > 1:
            generation._tasks = [
                asyncio.create_task(generation._pump(*numbered)) for numbered in enumerate(generation._streams)
            ]
        return generation

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, RequestDelta]:
        position, delta = await self._next()
        self._metrics[position].observe(delta)
        return position, delta

    async def _next(self) -> tuple[int, RequestDelta]:
        if len(self._streams) == 1:
            return 0, await anext(self._streams[0])
        while self._unfinished:
            position, item = await self._merged.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return position, item
            self._unfinished -= 1
        raise StopAsyncIteration

    async def _pump(self, position: int, stream: AsyncIterator[RequestDelta]) -> None:
        try:
            async for delta in stream:
                self._merged.put_nowait((position, delta))
        except Exception as error:
            self._merged.put_nowait((position, error))
        else:
            self._merged.put_nowait((position, None))

    async def close(self) -> None:
        """Aborts what still runs. Safe to call twice, and when nothing was read."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        for request, metrics in zip(self.requests, self._metrics, strict=False):  # those that were submitted
            if metrics.close():
                self._engine.abort(request.request_id)
        self._tasks = []
        self._streams = []


MAX_CHOICES = 2048
"""Most choices of one HTTP request, over all of its prompts."""


async def open_generation(
    engine: AsyncEngine,
    metrics: Metrics,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    priority: int,
    cache_salt: str | None,
    add_special_tokens: bool,
) -> Generation:
    """Checks and tokenizes every prompt, then queues them. Raises RequestError, QueueFullError, EngineStoppedError."""
    if len(prompts) * params.n > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n {params.n} are {len(prompts) * params.n} choices, at most {MAX_CHOICES} are "
            "allowed in one request",
            param="n",
        )
    requests = [
        await engine.prepare(
            prompt, params, priority=priority, cache_salt=cache_salt, add_special_tokens=add_special_tokens
        )
        for prompt in prompts
    ]
    return await Generation.submit(engine, requests, metrics)
