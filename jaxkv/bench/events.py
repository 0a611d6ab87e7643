"""Reading a streamed answer after the fact: which event arrived when, and what it said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from jaxkv.bench.http_client import Answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as measured. Times in seconds; itl: between one chunk with text and the next.

    error: why it does not count, or None. latency: from asking to the last chunk with text.
    counted: the token numbers are the server's own; else the prompt's is what was sent, the output's one for each chunk.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    started: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    error: str | None = None
    counted: bool = False

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None when there was only one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def events(answer: Answer) -> Iterator[tuple[float, bytes]]:
    """The `data:` payloads with the time at which their last byte arrived. Frames may be cut anywhere."""
    rest = b""
    for at, piece in answer.pieces:
        *frames, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for frame in frames:
            for line in frame.split(b"\n"):
                if line.startswith(b"data:"):
                    yield at, line[5:].strip()


def read_outcome(answer: Answer, expected_prompt_tokens: int) -> Outcome:
    """What a streamed completion or chat says of itself. Token counts are the server's own where it tells them."""
    if answer.status != 200:
        text = answer.body[:500].decode("utf-8", "replace")
        return Outcome(started=answer.started, error=f"HTTP {answer.status}: {text}")
    times: list[float] = []
    usage: dict[str, Any] = {}
    for at, payload in events(answer):
        if payload == b"[DONE]":
            break
        chunk = json.loads(payload)
        if "error" in chunk:
            return Outcome(started=answer.started, error=f"error in mid-stream: {chunk['error']}")
        usage = chunk.get("usage") or usage
        if any(_has_output(choice) for choice in chunk.get("choices", ())):
            times.append(at)
    if not times:
        return Outcome(started=answer.started, error="the stream ended without any output")
    return Outcome(
        prompt_tokens=usage.get("prompt_tokens", expected_prompt_tokens),
        output_tokens=usage.get("completion_tokens", len(times)),
        started=answer.started,
        ttft=times[0] - answer.started,
        itl=[later - earlier for earlier, later in pairwise(times)],
        latency=times[-1] - answer.started,
        counted=usage.keys() >= {"prompt_tokens", "completion_tokens"},
    )


def _has_output(choice: dict[str, Any]) -> bool:
    """A chunk that only opens a chat's turn is no output; the last one is, even if its token shows no text."""
    text = choice.get("text") or (choice.get("delta") or {}).get("content")
    return bool(text) or choice.get("finish_reason") is not None
