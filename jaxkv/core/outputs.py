"""What the engine says about a request: a delta per step, and the whole when it is joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Raw log-probability of one token.

    logprob: of `token_id`; rank: 1 = best; top: the k best as (id, logprob), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What one choice gained in a step. Joined texts of all deltas are the final text."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or the stop token id that ended it; None for end-of-sequence and for other reasons."""
    error: str | None = None
    """With finish_reason "error": what happened."""


@dataclass(slots=True)
class RequestTimes:
    """Times of one request, in seconds of time.monotonic(); None until it happened."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What a request gained in a step.

    prompt_logprobs: set once, in the first delta that carries it: entry 0 is None, entry i is for prompt token i.
    finished: all choices have ended; nothing follows.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[CompletionDelta, ...]
    finished: bool
    num_cached_tokens: int
    times: RequestTimes
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One finished choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request, as `Engine.generate` returns it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    times: RequestTimes
    prompt_logprobs: list[TokenLogprob | None] | None = None


def join_deltas(deltas: Iterable[RequestDelta], *, prompt: str | None = None) -> RequestOutput:
    """Joins the deltas of one request into its output. At least one delta is needed."""
    output: RequestOutput | None = None
    choices: dict[int, CompletionOutput] = {}
    for delta in deltas:
        if output is None:
            output = RequestOutput(
                request_id=delta.request_id,
                prompt=prompt,
                prompt_token_ids=list(delta.prompt_token_ids),
                outputs=[],
                num_cached_tokens=delta.num_cached_tokens,
                times=delta.times,
            )
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = list(delta.prompt_logprobs)
        output.times = delta.times
        for gain in delta.choices:
            _extend(choices.setdefault(gain.index, CompletionOutput(index=gain.index)), gain)
    if output is None:
        raise ValueError("join_deltas got no delta: a request has at least one")
    output.outputs = [choices[index] for index in sorted(choices)]
    return output


def _extend(choice: CompletionOutput, gain: CompletionDelta) -> None:
    choice.text += gain.text
    choice.token_ids.extend(gain.token_ids)
    if gain.logprobs:
        choice.logprobs = choice.logprobs or []
        choice.logprobs.extend(gain.logprobs)
    if gain.finish_reason is not None:
        choice.finish_reason = gain.finish_reason
        choice.stop_reason = gain.stop_reason
        choice.error = gain.error
