"""What clients see of faults, stalls, odd numbers and full queues. The engine plays a script."""

from __future__ import annotations

import httpx
import pytest
from fixtures.live_server import live_server
from fixtures.scripted_engine import ScriptedEngine, fault_after, infinities, say
from fixtures.sse import read_events, strict_json

from server.settings import ServerSettings

BODY = {"prompt": "x", "max_tokens": 50}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50}


def test_a_fault_in_mid_stream_ends_it_with_an_error_and_done() -> None:
    with live_server(ScriptedEngine(fault_after(2))) as url:
        chunks = read_events(httpx.post(f"{url}/v1/completions", json=BODY | {"stream": True}).content)
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["x", "x", ""]
    assert chunks[-2]["choices"][0]["finish_reason"] == "error"
    assert chunks[-1]["error"]["message"] == "the step produced a NaN"
    assert chunks[-1]["error"]["type"] == "InternalServerError"


def test_a_fault_without_a_stream_is_a_500_with_its_reason() -> None:
    with live_server(ScriptedEngine(fault_after(2))) as url:
        response = httpx.post(f"{url}/v1/chat/completions", json=CHAT)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the step produced a NaN"


def test_an_engine_that_stops_ends_streams_with_an_error() -> None:
    engine = ScriptedEngine(say("y" * 50), pace=0.01)
    with (
        live_server(engine) as url,
        httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as stream,
    ):
        raw = stream.iter_bytes()
        body = next(raw)
        engine.stopped = True
        body += b"".join(raw)
    error = read_events(body)[-1]["error"]
    assert error["code"] == "shutting_down"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_infinite_logprobs_become_a_number_that_json_knows(path: str, stream: bool) -> None:
    options = {"logprobs": 2} if path == "/v1/completions" else {"logprobs": True, "top_logprobs": 2}
    body = (BODY if path == "/v1/completions" else CHAT) | options | {"stream": stream}
    with live_server(ScriptedEngine(infinities)) as url:
        response = httpx.post(url + path, json=body)
    read = read_events if stream else strict_json
    assert "-9999.0" in str(read(response.content))


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_told_before_a_stream_opens(stream: bool) -> None:
    with live_server(ScriptedEngine(max_queued=0)) as url:
        response = httpx.post(f"{url}/v1/completions", json=BODY | {"stream": stream})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == "queue_full"


def test_prompts_of_a_request_are_queued_all_or_none() -> None:
    engine = ScriptedEngine(max_queued=2)
    with live_server(engine) as url:
        response = httpx.post(f"{url}/v1/completions", json=BODY | {"prompt": ["a", "b", "c"]})
        assert response.status_code == 503
        assert len(engine.aborted) == 2
        assert not engine.running


def test_while_loading_everything_but_health_says_503() -> None:
    with live_server(None) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        for path in ("/ready", "/v1/models", "/metrics"):
            response = httpx.get(url + path)
            assert response.status_code == 503
            assert "retry-after" in response.headers
        for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT), ("/tokenize", {"prompt": "x"})):
            assert httpx.post(url + path, json=body).json()["error"]["code"] == "loading"


def test_a_hanging_step_makes_the_server_unready() -> None:
    engine = ScriptedEngine()
    with live_server(engine, ServerSettings(heartbeat_limit=5)) as url:
        assert httpx.get(f"{url}/ready").status_code == 200
        engine.age = 6.0
        response = httpx.get(f"{url}/ready")
        assert response.status_code == 503
        assert "has not come round for 6 s" in response.json()["error"]["message"]
        engine.age = 0.0
        engine.is_ready = False
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 200


def test_an_unforeseen_error_is_a_500_in_the_usual_form(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    engine.submit = None  # type: ignore[assignment, method-assign]
    with live_server(engine) as url:
        response = httpx.post(f"{url}/v1/completions", json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "TypeError" in response.json()["error"]["message"]
