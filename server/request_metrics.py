"""What one engine request adds to the metrics while it runs and when it ends."""

from __future__ import annotations

from collections import Counter

from jaxkv.core.outputs import RequestDelta
from server.metrics import Metrics


class RequestMetrics:
    """Fed with every delta of one request; `close` counts the choices that never ended as aborted."""

    def __init__(self, metrics: Metrics, num_choices: int) -> None:
        self._metrics = metrics
        self._open_choices = num_choices
        self._tokens: Counter[int] = Counter()
        self._last_token: dict[int, float] = {}
        self._finished = False

    def observe(self, delta: RequestDelta) -> None:
        if not self._last_token and delta.times.first_token is not None:
            self._metrics.time_to_first_token.observe(delta.times.first_token - delta.times.arrival)
        for choice in delta.choices:
            if choice.token_ids:
                self._observe_tokens(choice.index, len(choice.token_ids), delta.times.last_token)
            if choice.finish_reason is not None:
                self._open_choices -= 1
                self._metrics.ended(choice.finish_reason)
        if delta.finished:
            self._finish(delta)

    def _observe_tokens(self, index: int, count: int, at: float | None) -> None:
        self._tokens[index] += count
        if at is None:
            return
        if index in self._last_token:
            self._metrics.inter_token_latency.observe(max(0.0, at - self._last_token[index]) / count)
        self._last_token[index] = at

    def _finish(self, delta: RequestDelta) -> None:
        self._finished = True
        self._metrics.prompt_tokens.observe(len(delta.prompt_token_ids))
        self._metrics.generation_tokens.observe(self._tokens.total())
        self._metrics.observe_times(delta.times, max(self._tokens.values(), default=0))

    def close(self) -> bool:
        """True if the request was still running, and so has to be aborted."""
        running = not self._finished
        self._finished = True
        for _ in range(self._open_choices):
            self._metrics.ended("abort")
        self._open_choices = 0
        return running
