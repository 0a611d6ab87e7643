"""Whole generations on an engine: many prompts to their end, or one as a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Self

from rich.progress import track

from jaxkv.core.errors import RequestError
from jaxkv.core.outputs import RequestDelta, RequestOutput, join_deltas
from jaxkv.core.sampling_params import SamplingParams
from jaxkv.engine.request import Prompt, as_prompt_list

if TYPE_CHECKING:
    from jaxkv.engine.engine import Engine


def generate(
    engine: Engine,
    prompts: Prompt | Seq[Prompt],
    params: SamplingParams | Seq[SamplingParams] | None,
    *,
    progress: bool,
) -> list[RequestOutput]:
    """See `Engine.generate`."""
    many = as_prompt_list(prompts)
    each = list(params) if isinstance(params, Seq) else [params] * len(many)
    if len(each) != len(many):
        raise RequestError(f"{len(many)} prompts came with {len(each)} params: give one, or one each", param="params")
    requests = [engine.prepare(prompt, p) for prompt, p in zip(many, each, strict=True)]
    gathered: dict[str, list[RequestDelta]] = {request.request_id: [] for request in requests}
    done: Iterable[str] = _finished(engine, gathered)
    if progress and len(requests) > 1:
        done = track(done, description="generating", total=len(requests))
    try:
        for request in requests:
            engine.submit(request)
        for _ in done:
            pass
    finally:
        for request in requests:
            engine.discard(request.request_id)
    return [join_deltas(gathered[request.request_id], prompt=request.prompt) for request in requests]


class Stream:
    """The deltas of one request, in order. Closing it, or letting go of it, aborts the request unless it has ended."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._ready: deque[RequestDelta] = deque()
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestDelta:
        while not self._ready:
            if self._ended:
                raise StopIteration
            _check_known(self._engine, self._request_id)
            self._ready.extend(self._engine.step_for({self._request_id}))
        delta = self._ready.popleft()
        self._ended = delta.finished
        return delta

    def close(self) -> None:
        """Ends it early; may be called twice."""
        self._ended = True
        self._ready.clear()
        self._engine.discard(self._request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._ended:
            self.close()


def stream(engine: Engine, prompt: Prompt, params: SamplingParams | None) -> Stream:
    """See `Engine.stream`."""
    return Stream(engine, engine.add_request(prompt, params))


def _check_known(engine: Engine, request_id: str) -> None:
    if not engine.knows(request_id):
        raise RuntimeError(
            f"the deltas of request {request_id} were taken by another reader (step), or it was discarded"
        )


def _finished(engine: Engine, gathered: dict[str, list[RequestDelta]]) -> Iterator[str]:
    """Steps until every request in `gathered` has all of its deltas; yields the ids as they finish."""
    left = set(gathered)
    while left:
        _check_known(engine, next(iter(left)))
        for delta in engine.step_for(gathered):
            gathered[delta.request_id].append(delta)
            if delta.finished:
                left.discard(delta.request_id)
                yield delta.request_id
