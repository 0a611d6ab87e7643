"""A small HTTP/1.1 client that notes when each piece of an answer arrived.

A general client spends hundreds of microseconds per streamed piece; on a machine that it shares with the server, that
would be measured, too. This one stores bytes with their time and leaves all reading to later.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from jaxkv.core.errors import JaxkvError


class ServerGoneError(JaxkvError):
    """The server cannot be reached, or went away in the middle of an answer."""


@dataclass(slots=True)
class Answer:
    """status: HTTP status. pieces: (seconds of time.perf_counter(), bytes) of the body. started: when it was asked."""

    started: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def json(self) -> Any:
        return json.loads(self.body)


class _StaleConnectionError(ServerGoneError):
    """A kept-alive connection that the server had closed already: no byte of an answer came."""


class HttpClient:
    """Requests to one server over as many kept-alive connections as are needed at once."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerGoneError(f"{base_url!r} is no http:// or https:// URL")
        self.base_url = base_url.rstrip("/")
        self._prefix = parts.path.rstrip("/")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        headers = [f"Host: {parts.netloc}", "Accept: */*", "Content-Type: application/json"]
        if api_key is not None:
            headers.append(f"Authorization: Bearer {api_key}")
        self._headers = "\r\n".join(headers)
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Answer:
        return await self._request("GET", path, b"")

    async def post(self, path: str, body: dict[str, Any]) -> Answer:
        return await self._request("POST", path, json.dumps(body, separators=(",", ":")).encode())

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _request(self, method: str, path: str, body: bytes) -> Answer:
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\nContent-Length: {len(body)}\r\n\r\n"
        while True:
            connection = await self._connection()
            try:
                answer = await connection.exchange(head.encode("latin-1") + body)
            except _StaleConnectionError:
                continue  # servers close kept-alive connections when they like; a new one is never stale
            break
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise ServerGoneError(f"cannot connect to {self.base_url}: {error.strerror or error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. The on_* methods are called by httptools' parser."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._answer = Answer(0.0)
        self._done: asyncio.Future[None] | None = None
        self._keeps_alive = True
        self._exchanges = 0
        self._answering = False

    @property
    def is_reusable(self) -> bool:
        return self._keeps_alive and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes) -> Answer:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._answer = Answer(time.perf_counter())
        self._exchanges += 1
        self._answering = False
        self._transport.write(request)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports share the interface, not the class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._answering = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._keeps_alive = False
        stale = self._exchanges > 1 and not self._answering
        error = _StaleConnectionError if stale else ServerGoneError
        self._fail(f"the server closed the connection in mid-answer{'' if exc is None else f': {exc}'}", error)

    def on_body(self, body: bytes) -> None:
        self._answer.pieces.append((time.perf_counter(), body))

    def on_message_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        self._keeps_alive = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, message: str, error: type[ServerGoneError] = ServerGoneError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error(message))
