"""Whole generations on an engine: many prompts to their end, or one as a stream."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

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
    gathered: dict[str, list[RequestDelta]] = {engine.submit(request): [] for request in requests}
    done: Iterable[str] = _finished(engine, gathered)
    if progress and len(requests) > 1:
        done = track(done, description="generating", total=len(requests))
    try:
        for _ in done:
            pass
    finally:
        for request in requests:
            engine.discard(request.request_id)
    return [join_deltas(gathered[request.request_id], prompt=request.prompt) for request in requests]


def stream(engine: Engine, prompt: Prompt, params: SamplingParams | None) -> Iterator[RequestDelta]:
    """See `Engine.stream`."""
    request_id = engine.add_request(prompt, params)

    def deltas() -> Generator[RequestDelta, None, None]:
        finished = False
        try:
            while not finished:
                for delta in engine.step_for({request_id}):
                    finished = delta.finished
                    yield delta
        finally:
            engine.discard(request_id)

    return deltas()


def _finished(engine: Engine, gathered: dict[str, list[RequestDelta]]) -> Iterator[str]:
    """Steps until every request in `gathered` has all of its deltas; yields the ids as they finish."""
    left = set(gathered)
    while left:
        for delta in engine.step_for(gathered):
            gathered[delta.request_id].append(delta)
            if delta.finished:
                left.discard(delta.request_id)
                yield delta.request_id
