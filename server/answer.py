"""From engine deltas to an answer.

A whole answer is folded from the very parts that a stream would have sent, so the two cannot differ.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from jaxkv.core.outputs import RequestDelta
from server.errors import ApiError, as_api_error
from server.generation import Generation
from server.sse import DONE, EventStream, event, until_disconnect

Part = dict[str, Any]


class PartWriter(Protocol):
    """One route's way to write what its choices gained."""

    id_prefix: str
    chunk_object: str
    whole_object: str

    def parts(self, position: int, delta: RequestDelta) -> list[Part]:
        """What the choices of prompt `position` gained, as `choices` entries of a stream; gains of nothing left out."""

    def whole(self, parts: list[Part]) -> list[Part]:
        """All parts folded into the `choices` of a whole answer."""

    def extras(self) -> dict[str, Any]:
        """Fields beside `choices`, each told once: by the first chunk after they are known, or by the whole answer."""


class _Usage:
    def __init__(self) -> None:
        self._prompt: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._completion = 0

    def add(self, position: int, delta: RequestDelta) -> None:
        self._prompt[position] = len(delta.prompt_token_ids)
        self._cached[position] = delta.num_cached_tokens
        self._completion += sum(len(choice.token_ids) for choice in delta.choices)

    def body(self) -> dict[str, Any]:
        prompt = sum(self._prompt.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion,
            "total_tokens": prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


async def answer(
    http: Request, generation: Generation, writer: PartWriter, *, model: str, stream: bool, include_usage: bool
) -> Response:
    """Streams or collects the generation, and closes it.

    Raises ClientDisconnect when nobody waits for a whole answer any more.
    """
    head = {"id": f"{writer.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
    if stream:
        events = _events(generation, writer, head | {"object": writer.chunk_object}, include_usage)
        return EventStream(events, generation.close)
    async with generation:
        return JSONResponse(
            await until_disconnect(http.receive, _whole(generation, writer, head | {"object": writer.whole_object}))
        )


async def _whole(generation: Generation, writer: PartWriter, head: dict[str, Any]) -> dict[str, Any]:
    usage = _Usage()
    parts: list[Part] = []
    async for position, delta in generation:
        usage.add(position, delta)
        if failure := _failure(delta):
            raise failure
        parts += writer.parts(position, delta)
    return head | {"choices": writer.whole(parts), "usage": usage.body()} | writer.extras()


async def _events(
    generation: Generation, writer: PartWriter, head: dict[str, Any], include_usage: bool
) -> AsyncGenerator[bytes]:
    usage = _Usage()
    # With include_usage every chunk has the field, and only the last one a value.
    head = head | {"usage": None} if include_usage else head
    try:
        async for position, delta in generation:
            usage.add(position, delta)
            parts = writer.parts(position, delta)
            if parts:
                yield b"".join([event(head | {"choices": [part]} | writer.extras()) for part in parts])
            if failure := _failure(delta):
                raise failure
        if include_usage:
            yield event(head | {"choices": [], "usage": usage.body()})
    except Exception as error:
        yield event(as_api_error(error).body())
    yield DONE


def _failure(delta: RequestDelta) -> ApiError | None:
    """An end that is no answer: a fault in a step, or an abort that did not come from this client."""
    for choice in delta.choices:
        if choice.finish_reason == "error":
            return ApiError(500, choice.error or "the engine failed on this request", code="engine_error")
        if choice.finish_reason == "abort":
            return ApiError(503, choice.error or "the request was aborted: the server is shutting down", code="aborted")
    return None
