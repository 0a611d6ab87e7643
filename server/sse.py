"""Server-sent events: framing, and a response that stops its source as soon as the client has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One event. JSON escapes line breaks, so the frame is always one line; NaN and Infinity raise ValueError."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


class EventStream(Response):
    """Sends `events` as they come. When the client disconnects, the iterator is cancelled where it stands.

    close: called at the end in every case, even if the client had gone before the first event was asked for.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        self._events = events
        self._close = close
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await until_disconnect(receive, self._send(send))
        finally:
            await self._events.aclose()
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled, and ClientDisconnect raised, as soon as the client has gone.

    The request body must have been read: `receive` then has nothing else to tell.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        # Waits until the cancelled work has cleaned up.
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
