"""A request while it is in the engine: its choices, its prompt log-probabilities, and the delta of the current step."""

from __future__ import annotations

import dataclasses

from jaxkv.core.outputs import CompletionDelta, RequestDelta, RequestTimes, TokenLogprob
from jaxkv.engine.choice import Choice
from jaxkv.engine.request import Request


class LiveRequest:
    """Gathers what a step brings for the choices of one request."""

    def __init__(self, request: Request, times: RequestTimes) -> None:
        self.request = request
        self.times = times
        self.choices: list[Choice] = []
        self._gains: list[CompletionDelta] = []
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        self._prompt_logprobs_sent = request.params.prompt_logprobs is None

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def prompt_logprobs_known(self) -> int:
        """Prompt positions whose log-probability has been computed, the first included, which has none."""
        return len(self._prompt_logprobs)

    def gain(self, delta: CompletionDelta) -> None:
        self._gains.append(delta)

    def add_prompt_logprobs(self, logprobs: list[TokenLogprob]) -> None:
        """In order of position; a preempted request may compute some again, which are not added twice."""
        self._prompt_logprobs.extend(logprobs)

    def take_delta(self, now: float) -> RequestDelta | None:
        """What the request gained since the last call, stamped with the time `now`; None if nothing."""
        whole = None
        if not self._prompt_logprobs_sent and len(self._prompt_logprobs) == len(self.request.prompt_token_ids):
            whole, self._prompt_logprobs_sent = tuple(self._prompt_logprobs), True
        if not self._gains and whole is None:
            return None
        gains, self._gains = tuple(self._gains), []
        if any(gain.token_ids for gain in gains):
            self.times.first_token = self.times.first_token or now
            self.times.last_token = now
        if self.finished:
            self.times.finished = now
        return RequestDelta(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            choices=gains,
            finished=self.finished,
            num_cached_tokens=self.choices[0].sequence.num_cached_tokens,
            times=dataclasses.replace(self.times),
            prompt_logprobs=whole,
        )
