"""An engine that plays a script: what the server does with faults, stalls and odd numbers, without a model."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import EngineStoppedError, QueueFullError, RequestError
from jaxkv.core.outputs import CompletionDelta, RequestDelta, RequestTimes, TokenLogprob
from jaxkv.core.sampling_params import SamplingParams
from jaxkv.text.chat import render_chat
from tests.fixtures.byte_tokenizer import byte_tokenizer

Script = Callable[[Any], Iterator[RequestDelta]]
MODEL = "scripted"
MAX_MODEL_LEN = 4096


def say(text: str) -> Script:
    """Every choice says `text`, one byte per step, cut in the middle of characters like a real engine cuts."""

    def play(request: Any) -> Iterator[RequestDelta]:
        params: SamplingParams = request.params
        data = text.encode()[: params.max_tokens]
        scored = scored_prompt(request)
        if not data:
            ends = tuple(CompletionDelta(i, finish_reason="length") for i in range(params.n))
            yield delta(request, ends, finished=True, prompt_logprobs=scored)
            return
        shown = 0
        for step, byte in enumerate(data):
            last = step == len(data) - 1
            whole = data[: step + 1].decode("utf-8", "replace" if last else "ignore")
            gain, shown = whole[shown:], len(whole)
            logprobs = (token_logprob(byte, params.logprobs),) if params.logprobs is not None else ()
            reason = None if not last else ("length" if params.max_tokens == len(data) else "stop")
            yield delta(
                request,
                tuple(CompletionDelta(i, gain, (byte,), logprobs, reason) for i in range(params.n)),
                finished=last,
                prompt_logprobs=scored if step == 0 else None,
            )

    return play


def token_logprob(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, 1, tuple((token + k, -0.5 - k) for k in range(top)))


def scored_prompt(request: Any) -> tuple[TokenLogprob | None, ...] | None:
    top = request.params.prompt_logprobs
    if top is None:
        return None
    return (None, *(token_logprob(token, top) for token in request.prompt_token_ids[1:]))


def delta(
    request: Any,
    choices: tuple[CompletionDelta, ...],
    *,
    finished: bool = False,
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None,
) -> RequestDelta:
    times: RequestTimes = request.times
    now = time.monotonic()
    times.first_scheduled = times.first_scheduled or now
    if any(choice.token_ids for choice in choices):
        times.first_token = times.first_token or now
        times.last_token = now
    times.finished = now if finished else None
    return RequestDelta(request.request_id, request.prompt_token_ids, choices, finished, 2, times, prompt_logprobs)


def infinities(request: Any) -> Iterator[RequestDelta]:
    """Log-probabilities that JSON cannot say."""
    odd = TokenLogprob(65, -math.inf, 3, ((66, math.nan), (67, -math.inf)))
    yield delta(request, (CompletionDelta(0, "A", (65,), (odd,), "stop"),), finished=True)


def fault_after(steps: int) -> Script:
    """A fault inside a step, after some good ones."""

    def play(request: Any) -> Iterator[RequestDelta]:
        for _ in range(steps):
            yield delta(request, (CompletionDelta(0, "x", (120,)),))
        bad = CompletionDelta(0, finish_reason="error", error="the step produced a NaN")
        yield delta(request, (bad,), finished=True)

    return play


class ScriptedEngine:
    """AsyncEngine's interface. One delta per `pace` seconds; `max_running` requests run, the others wait."""

    def __init__(self, script: Script | None = None, *, pace: float = 0.0, max_queued: int | None = None) -> None:
        self.script = script or say("hello")
        self.pace = pace
        self.max_queued = max_queued
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.requests: list[Any] = []
        self.on_step: list[Any] = []
        self.age = 0.0
        self.stopped = False
        self.is_ready = True
        self.tokenizer = byte_tokenizer()
        self.engine = SimpleNamespace(
            tokenizer=self.tokenizer,
            model_name=MODEL,
            config=replace(EngineConfig(MODEL), max_model_len=MAX_MODEL_LEN, kv_cache_dtype="float32"),
            generation_config={},
            prepare=self._prepare,
            last_step=None,
        )

    def stats(self) -> Any:
        return SimpleNamespace(
            num_running=len(self.running),
            num_waiting=0,
            kv_usage=0.25,
            num_blocks=16,
            block_size=4,
            prompt_tokens=11,
            generation_tokens=7,
            prefix_cache_queries=5,
            prefix_cache_hits=3,
            num_preemptions=1,
            recompilations=0,
        )

    def _encode(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            options = {k: v for k, v in prompt.items() if k not in ("messages", "chat_template_kwargs")}
            text = render_chat(self.tokenizer.chat_template, prompt["messages"], **options)
            return text, self.tokenizer.encode(text, add_special_tokens=False)
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, list(prompt)

    async def prepare(self, prompt: Any, params: SamplingParams, **options: Any) -> Any:
        return self._prepare(prompt, params, **options)

    def _prepare(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> Any:
        text, ids = self._encode(prompt)
        if len(ids) >= MAX_MODEL_LEN:
            raise RequestError(f"{len(ids)} tokens are too many", param="prompt", code="context_length_exceeded")
        max_tokens = MAX_MODEL_LEN - len(ids) if params.max_tokens is None else params.max_tokens
        request = SimpleNamespace(
            request_id=request_id or uuid.uuid4().hex,
            prompt=text,
            prompt_token_ids=tuple(ids),
            params=replace(params, max_tokens=max_tokens),
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            times=RequestTimes(time.monotonic()),
        )
        self.requests.append(request)
        return request

    def submit(self, request: Any) -> AsyncIterator[RequestDelta]:
        if self.stopped:
            raise EngineStoppedError("the engine has stopped")
        if self.max_queued is not None and len(self.running) >= self.max_queued:
            raise QueueFullError(f"the queue is full: {self.max_queued} requests wait", retry_after=3)
        self.running.add(request.request_id)
        return self._play(request)

    async def _play(self, request: Any) -> AsyncIterator[RequestDelta]:
        for item in self.script(request):
            await asyncio.sleep(self.pace)
            if self.stopped:
                raise EngineStoppedError("the engine has stopped")
            if item.finished:
                self.running.discard(request.request_id)
            yield item

    def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self.running.discard(request_id)
            self.aborted.append(request_id)

    def start(self) -> None:
        pass

    def heartbeat_age(self) -> float:
        return self.age

    async def drain(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self.running and time.monotonic() < end:
            await asyncio.sleep(0.01)

    def shutdown(self) -> None:
        self.stopped = True
