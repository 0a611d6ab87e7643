"""What a stream's times and tokens are taken to be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxkv.bench.events import Outcome, events, read_outcome
from jaxkv.bench.http_client import Answer


def chunk(text: str | None = None, **more: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": None}]
    return b"data: " + json.dumps({"choices": choices} | more).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_times_tokens_and_the_servers_own_usage() -> None:
    usage = {"prompt_tokens": 128, "completion_tokens": 4}
    pieces = [(10.5, chunk("a")), (10.7, chunk("b")), (11.0, chunk("cd")), (11.1, chunk(usage=usage) + DONE)]
    outcome = read_outcome(Answer(10.0, 200, pieces), 99)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.error) == (128, 4, None)
    assert outcome.counted
    assert outcome.ttft == pytest.approx(0.5)
    assert outcome.itl == pytest.approx([0.2, 0.3])
    assert outcome.latency == pytest.approx(1.0)
    assert outcome.tpot == pytest.approx(0.5 / 3)


def test_without_usage_chunks_are_counted() -> None:
    outcome = read_outcome(Answer(0.0, 200, [(1.0, chunk("a") + chunk("b") + DONE)]), 7)
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.counted) == (7, 2, False)


def test_one_token_has_no_time_per_output_token() -> None:
    assert Outcome(output_tokens=1).tpot is None


def test_frames_may_be_cut_anywhere() -> None:
    body = chunk("é") + b": comment\r\n\r\n" + b"data:{}\r\n\r\n" + DONE
    whole = [payload for _, payload in events(Answer(0.0, 200, [(1.0, body)]))]
    assert whole[-1] == b"[DONE]"
    assert len(whole) == 3
    for cut in range(len(body)):
        parts = [(1.0, body[:cut]), (2.0, body[cut:])]
        assert [payload for _, payload in events(Answer(0.0, 200, parts))] == whole


def test_an_event_has_the_time_of_its_last_byte() -> None:
    body = chunk("a")
    assert [at for at, _ in events(Answer(0.0, 200, [(1.0, body[:-1]), (2.0, body[-1:])]))] == [2.0]


def test_opening_a_chat_turn_is_no_output() -> None:
    def chat(delta: dict[str, str], reason: str | None = None) -> bytes:
        return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": reason}]}).encode() + b"\n\n"

    pieces = [
        (1.0, chat({"role": "assistant", "content": ""})),
        (2.0, chat({"content": "x"})),
        (3.0, chat({}, "stop") + DONE),
    ]
    outcome = read_outcome(Answer(0.0, 200, pieces), 1)
    assert (outcome.ttft, outcome.latency) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(0.0, 503, [(1.0, b'{"error": "full"}')]), "HTTP 503"),
        (Answer(0.0, 200, [(1.0, b'data: {"error": {"message": "NaN"}}\n\n' + DONE)]), "NaN"),
        (Answer(0.0, 200, [(1.0, DONE)]), "without any output"),
    ],
)
def test_failures_say_why(answer: Answer, message: str) -> None:
    outcome = read_outcome(answer, 1)
    assert outcome.error is not None
    assert message in outcome.error
