"""Clients that go away leave nothing behind: no request, no page."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest
from fixtures.live_server import live_server
from fixtures.scripted_engine import ScriptedEngine, say

from jaxkv.engine.async_engine import AsyncEngine

LONG = {"prompt": "go on", "max_tokens": 200, "ignore_eos": True}


def eventually(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
def test_a_disconnect_aborts_at_once(stream: bool, prompt: object) -> None:
    engine = ScriptedEngine(say("y" * 2000), pace=0.02)
    with live_server(engine) as url:
        body = LONG | {"stream": stream, "prompt": prompt}
        if stream:
            with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
                next(answer.iter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/completions", json=body, timeout=0.2)
        eventually(lambda: not engine.running, 2.0)
        assert len(engine.aborted) == (1 if isinstance(prompt, str) else 2)
        metrics = httpx.get(f"{url}/metrics").text
    assert f'request_success_total{{finished_reason="abort",model_name="scripted"}} {len(engine.aborted)}.0' in metrics


def test_200_clients_that_leave_at_random_points(engine: AsyncEngine, base_url: str, client: httpx.Client) -> None:
    asyncio.run(_leave_early(base_url, 200))
    eventually(lambda: engine.num_unfinished == 0)
    eventually(lambda: engine.stats().num_running == 0 and engine.stats().num_waiting == 0)
    stats = engine.stats()
    assert stats.num_blocks_held == 0
    engine.engine.check()
    assert stats.recompilations == 0
    after = client.post("/v1/completions", json={"prompt": "still there?", "max_tokens": 4})
    assert after.status_code == 200


async def _leave_early(base_url: str, count: int) -> None:
    rng = random.Random(0)
    parts = urlsplit(base_url)

    async def leave() -> None:
        await asyncio.sleep(rng.random() * 2)
        body = LONG | {"stream": rng.random() < 0.7, "n": rng.choice([1, 1, 3]), "temperature": 1, "seed": 1}
        if rng.random() < 0.2:
            body["prompt"] = ["several", "prompts"]
        raw = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        whole = f"{head}{len(raw)}\r\n\r\n".encode() + raw
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        # Some go before their request is complete.
        writer.write(whole[: rng.randrange(len(whole))] if rng.random() < 0.1 else whole)
        try:
            async with asyncio.timeout(rng.random() * 0.5):
                while await reader.read(4096):
                    pass
        except TimeoutError:
            pass
        if rng.random() < 0.5:
            writer.transport.abort()
        writer.close()

    await asyncio.gather(*(leave() for _ in range(count)))
