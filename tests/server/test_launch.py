"""The process: the port at once, a load in the background, draining, and how it ends."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from fixtures.sse import read_events

from server.port import PortError, bind

ROOT = Path(__file__).parents[2]
PROGRAM = """
import logging, sys, time
from fixtures.scripted_engine import ScriptedEngine, say
from jaxkv.core.errors import ModelLoadError
from jaxkv.cli.log import log_to_stderr
from server.launch import serve
from server.port import bind
from server.settings import ServerSettings

def load():
    time.sleep({load_seconds})
    {load}

log_to_stderr(logging.INFO)
sys.exit(serve(bind("127.0.0.1", {port}), load, ServerSettings(shutdown_timeout={shutdown_timeout})))
"""
ANSWER = 'return ScriptedEngine(say("y" * 3000), pace=0.02)'


def free_port() -> int:
    """Below the ports that clients get from the system: one of those could be taken between here and the server's start."""
    for port in random.sample(range(20_000, 30_000), 100):
        with suppress(PortError), bind("127.0.0.1", port):
            return port
    raise AssertionError("no free port")


@contextmanager
def server(
    port: int, *, load: str = ANSWER, load_seconds: float = 0.0, shutdown_timeout: float = 10.0
) -> Iterator[subprocess.Popen[str]]:
    program = PROGRAM.format(port=port, load=load, load_seconds=load_seconds, shutdown_timeout=shutdown_timeout)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(url: str, status: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if httpx.get(url, timeout=10).status_code == status:
                return
        except httpx.ConnectError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{url} never answered {status}")


class Stream(threading.Thread):
    """Reads one streamed answer to its end."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__()
        self.body = b""
        self._url = url
        self._json = {"prompt": "x", "max_tokens": max_tokens, "stream": True}
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._json, timeout=60) as stream:
            for chunk in stream.iter_bytes():
                self.body += chunk
                self.begun.set()


def test_a_port_in_use_is_one_clear_error() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(PortError, match=r"port \d+: Address already in use"):
        bind("127.0.0.1", first.getsockname()[1])
    with pytest.raises(PortError, match="cannot listen on 203"):
        bind("203.0.113.1", 0)


def test_ipv6_addresses() -> None:
    with bind("::1", 0) as sock:
        assert sock.family is socket.AF_INET6


def test_it_answers_while_loading_then_drains_on_sigterm() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server(port, load_seconds=1.0) as process:
        wait_for(f"{url}/ready", 503)
        assert httpx.get(f"{url}/health").status_code == 200
        wait_for(f"{url}/ready", 200)
        stream = Stream(url, 60)
        assert stream.begun.wait(20)
        process.send_signal(signal.SIGTERM)
        wait_for(f"{url}/ready", 503)
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert process.wait(20) == 0
        stream.join(20)
    chunks = read_events(stream.body)
    assert len(chunks) == 60
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_what_does_not_finish_in_time_is_told() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server(port, shutdown_timeout=0.3) as process:
        wait_for(f"{url}/ready", 200)
        stream = Stream(url, 3000)
        assert stream.begun.wait(20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        stream.join(20)
    assert read_events(stream.body)[-1]["error"]["code"] == "shutting_down"


def test_a_second_signal_stops_at_once() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server(port, shutdown_timeout=60) as process:
        wait_for(f"{url}/ready", 200)
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3000, "stream": True}
        ) as stream:
            chunks = stream.iter_bytes()  # an iterator that nobody holds closes the connection
            next(chunks)
            process.send_signal(signal.SIGTERM)
            wait_for(f"{url}/ready", 503)
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 128 + signal.SIGTERM


def test_sigterm_while_loading_does_not_wait_for_the_model() -> None:
    port = free_port()
    with server(port, load_seconds=600) as process:
        wait_for(f"http://127.0.0.1:{port}/ready", 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_failed_load_is_one_line_and_a_bad_exit_code() -> None:
    with server(free_port(), load='raise ModelLoadError("x.gguf: the file is truncated")') as process:
        assert process.wait(60) == 1
        assert process.stderr is not None
        lines = [line for line in process.stderr.read().splitlines() if "ERROR" in line]
    assert len(lines) == 1
    assert lines[0].endswith("the model could not be loaded: x.gguf: the file is truncated")
