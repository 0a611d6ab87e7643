"""The benchmark's HTTP client: kept-alive connections that the server closes between two requests."""

from __future__ import annotations

import asyncio

import pytest

from jaxkv.bench.http_client import HttpClient, ServerGoneError

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def exchanges(*, answers_per_connection: int, requests: int, cut: bool = False) -> tuple[int, int]:
    """(requests answered, connections made) with a server that closes a connection as the next request arrives."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(answers_per_connection):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER[:-1] if cut else ANSWER)
            await writer.drain()
            if cut:
                break
        else:
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        bodies = [(await client.get("/")).body for _ in range(requests)]
    finally:
        await client.close()
        server.close()
        await server.wait_closed()
    return sum(body == b"ok" for body in bodies), connections


def test_a_stale_connection_is_replaced() -> None:
    assert asyncio.run(exchanges(answers_per_connection=2, requests=5)) == (5, 3)


def test_an_answer_that_is_cut_short_is_an_error() -> None:
    with pytest.raises(ServerGoneError, match="in mid-answer"):
        asyncio.run(exchanges(answers_per_connection=1, requests=1, cut=True))


def test_a_new_connection_that_is_closed_at_once_is_an_error() -> None:
    with pytest.raises(ServerGoneError, match="in mid-answer"):
        asyncio.run(exchanges(answers_per_connection=0, requests=1))
