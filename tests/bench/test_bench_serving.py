"""The whole client against servers that play a script."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fixtures.live_server import live_server
from fixtures.scripted_engine import ScriptedEngine, say

from jaxkv.bench.http_client import HttpClient, ServerGoneError
from jaxkv.bench.serving import Benchmark, run
from jaxkv.bench.workload import BenchmarkError, random_ids
from server.settings import ServerSettings


def small(url: str, **more: Any) -> Benchmark:
    return Benchmark(
        **{
            "base_url": url,
            "num_prompts": 12,
            "input_len": 40,
            "output_len": 6,
            "max_concurrency": 4,
            "vocab": (0, 256),
            "ignore_eos": True,
        }
        | more
    )


def test_every_request_is_sent_with_exactly_as_many_tokens_as_asked() -> None:
    engine = ScriptedEngine(say("a" * 6), pace=0.005)
    with live_server(engine) as url:
        result, outcomes = run(small(url))
    probe, *measured = engine.requests
    assert {len(request.prompt_token_ids) for request in measured} == {40}
    assert len({request.prompt_token_ids for request in [probe, *measured]}) == 13
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (12, 480, 72)
    assert all(outcome.itl and min(outcome.itl) > 0 for outcome in outcomes)
    assert result["mean_tpot_ms"] >= 5


def test_concurrency_is_a_limit() -> None:
    engine = ScriptedEngine(say("a" * 6), pace=0.01)
    most = 0
    submit = engine.submit

    def watching(request: Any) -> Any:
        nonlocal most
        stream = submit(request)
        most = max(most, len(engine.running))
        return stream

    engine.submit = watching  # type: ignore[method-assign]
    with live_server(engine) as url:
        run(small(url))
    assert most == 4


def test_chat_prompts_are_texts_of_the_right_length() -> None:
    engine = ScriptedEngine()
    with live_server(engine) as url:
        result, _ = run(small(url, endpoint="/v1/chat/completions", input_len=100))
    assert result["endpoint_type"] == "openai-chat"
    assert result["total_input_tokens"] / 12 == pytest.approx(100, abs=8)


def test_a_key_a_rate_and_a_path_before_v1() -> None:
    with live_server(ScriptedEngine(), ServerSettings(api_key="k")) as url:
        result, _ = run(small(url, api_key="k", request_rate=200.0))
        assert result["completed"] == 12
        assert result["request_rate"] == 200.0
        with pytest.raises(BenchmarkError, match="HTTP 401"):
            run(small(url))


def test_a_server_that_refuses_everything_is_told_with_its_reason() -> None:
    with live_server(ScriptedEngine()) as url, pytest.raises(BenchmarkError, match="does not exist"):
        run(small(url, model="other"))


def test_nobody_there() -> None:
    with pytest.raises(ServerGoneError, match=r"cannot connect to http://127\.0\.0\.1:1"):
        run(small("http://127.0.0.1:1"))
    with pytest.raises(ServerGoneError, match="is no http"):
        run(small("ftp://x"))


@contextmanager
def raw_server(*answers: bytes) -> Iterator[str]:
    """Answers each connection's first request with the next bytes, then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


def ask(url: str, times: int = 1) -> list[bytes]:
    async def get() -> list[bytes]:
        client = HttpClient(url)
        try:
            return [(await client.get("/")).body for _ in range(times)]
        finally:
            await client.close()

    return asyncio.run(get())


def test_the_http_client_reads_chunks_and_lengths_and_opens_closed_connections_again() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    length = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
    with raw_server(length, chunked) as url:
        assert ask(url, 2) == [b"hi", b"abcde"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", "closed the connection"),
        (b"", "closed the connection"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
    ],
)
def test_broken_answers_are_errors(answer: bytes, message: str) -> None:
    with raw_server(answer) as url, pytest.raises(ServerGoneError, match=message):
        ask(url)


def test_prompts_are_the_same_for_the_same_seed() -> None:
    assert random_ids(3, 5, vocab=(300, 400), seed=1) == random_ids(3, 5, vocab=(300, 400), seed=1)
    assert random_ids(3, 5, vocab=(300, 400), seed=1) != random_ids(3, 5, vocab=(300, 400), seed=2)
    assert all(300 <= token < 400 for row in random_ids(9, 9, vocab=(300, 400), seed=3) for token in row)
