"""The engine on a thread of its own, for servers: requests come in from event loops, deltas go back to them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from jaxkv.core.errors import EngineStoppedError, QueueFullError, RequestError
from jaxkv.core.outputs import RequestDelta
from jaxkv.core.sampling_params import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Prompt, Request
from jaxkv.engine.stats import EngineStats, StepStats

log = logging.getLogger("jaxkv")
_IDLE_SECONDS = 0.5
"""How often an idle loop comes round, to keep its heartbeat fresh."""

StepListener = Callable[[StepStats, EngineStats], None]


class RequestStream:
    """The deltas of one request, for one event loop. Leaving it early (`aclose`, cancellation) aborts the request."""

    def __init__(self, engine: AsyncEngine, request: Request) -> None:
        self.request = request
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[RequestDelta | Exception] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> AsyncIterator[RequestDelta]:
        return self

    async def __anext__(self) -> RequestDelta:
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except BaseException:
            await self.aclose()
            raise
        if isinstance(item, Exception):
            self._ended = True
            raise item
        self._ended = item.finished
        return item

    async def aclose(self) -> None:
        """Aborts the request unless it has ended. The engine lets go of it before its next step."""
        if not self._ended:
            self._ended = True
            self._engine.leave(self)

    def put(self, item: RequestDelta | Exception) -> None:
        """Called from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
        except RuntimeError:  # its event loop is closed: nobody will read this
            self._engine.leave(self)


class AsyncEngine:
    """Runs an Engine in one loop thread. All methods may be called from any thread; streams belong to their event loop.

    Attributes:
      on_step: called in the loop thread after each step with its numbers. Must be quick and must not raise.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.on_step: list[StepListener] = []
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], object]] = deque()  # for the loop thread, in order
        self._unfinished = 0  # sequences of the streams
        self._streams: dict[str, RequestStream] = {}  # all that somebody may be reading
        self._served: dict[str, RequestStream] = {}  # those that the engine knows; the loop thread's own
        self._taking = True
        self._stop = False
        self._death: BaseException | None = None
        self._last_round = time.monotonic()
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._loop, name="jaxkv-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return self._taking and self._death is None and self._thread.is_alive()

    @property
    def num_unfinished(self) -> int:
        """Requests whose end has not been delivered."""
        with self._changed:
            return len(self._streams)

    def heartbeat_age(self) -> float:
        """Seconds since the loop last came round; grows while a step hangs."""
        return time.monotonic() - self._last_round

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    async def prepare(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Request:
        """`Engine.prepare` in a thread, so that a long text does not stop the event loop. Raises RequestError."""
        return await asyncio.to_thread(self.engine.prepare, prompt, params, **options)

    def submit(self, request: Request) -> RequestStream:
        """Queues a prepared request for the running event loop. Raises QueueFullError and EngineStoppedError at once."""
        stream = RequestStream(self, request)
        with self._changed:
            self._refuse_if_closed()
            self._refuse_if_full(request)
            if request.request_id in self._streams:
                raise RequestError(f"request_id {request.request_id!r} is in use: choose another", param="request_id")
            self._streams[request.request_id] = stream
            self._commands.append(partial(self._submit, stream))
            self._unfinished += request.params.n
            self._changed.notify()
        return stream

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[RequestDelta]:
        """Prepares, submits and yields the deltas; leaving the iteration early aborts the request."""
        stream = self.submit(await self.prepare(prompt, params, **options))
        try:
            async for delta in stream:
                yield delta
        finally:
            await stream.aclose()

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step; its stream ends with finish_reason "abort". Unknown ids are ignored."""
        with self._changed:
            self._commands.append(partial(self.engine.abort, request_id))
            self._changed.notify()

    def leave(self, stream: RequestStream) -> None:
        """Aborts the request of a stream that nobody reads any more, unless it has ended."""
        with self._changed:
            if self._forget(stream):
                self._commands.append(partial(self._discard, stream.request.request_id))
                self._changed.notify()

    async def drain(self, timeout: float) -> bool:
        """Takes no more requests and waits until the running ones have ended; False when the time was too short."""
        self._taking = False
        deadline = time.monotonic() + timeout
        while self.num_unfinished and self._thread.is_alive():
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return self.num_unfinished == 0

    def shutdown(self) -> None:
        """Stops the loop after its current step. Streams that are still open end with EngineStoppedError."""
        with self._changed:
            self._taking = False
            self._stop = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._fail_all(EngineStoppedError("the engine was shut down"))

    # --- the loop thread ------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while self._await_work():
                self._take_commands()
                if self.engine.has_unfinished:
                    self._deliver(self.engine.step())
                self._stats = self.engine.stats()
                for listener in self.on_step:
                    listener(self.engine.last_step, self._stats)
        except BaseException as error:
            log.exception("the engine's loop failed; it takes no more requests")
            with self._changed:
                self._death = error
            self._fail_all(EngineStoppedError(f"the engine stopped: {type(error).__name__}: {error}"))

    def _await_work(self) -> bool:
        """Waits until there is something to do. False when the loop is to stop."""
        with self._changed:
            while True:
                self._last_round = time.monotonic()
                if self._stop:
                    return False
                if self._commands or self.engine.has_unfinished:
                    return True
                self._changed.wait(_IDLE_SECONDS)

    def _take_commands(self) -> None:
        with self._changed:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command()

    def _discard(self, request_id: str) -> None:
        self._served.pop(request_id, None)
        self.engine.discard(request_id)

    def _submit(self, stream: RequestStream) -> None:
        try:
            self.engine.submit(stream.request)
            self._served[stream.request.request_id] = stream
        except Exception as error:  # it is this request's, and must not end the others
            with self._changed:
                self._forget(stream)
            stream.put(error)

    def _deliver(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            stream = self._served.get(delta.request_id)
            if stream is None:
                continue
            if delta.finished:
                del self._served[delta.request_id]
                with self._changed:
                    self._forget(stream)
            stream.put(delta)

    def _forget(self, stream: RequestStream) -> bool:
        """Its id may be used again. False when it was forgotten before. The caller holds the lock."""
        if self._streams.get(stream.request.request_id) is not stream:
            return False
        del self._streams[stream.request.request_id]
        self._unfinished -= stream.request.params.n
        return True

    def _fail_all(self, error: Exception) -> None:
        with self._changed:
            streams = list(self._streams.values())
            self._streams.clear()
            self._commands.clear()
            self._unfinished = 0
        for stream in streams:
            stream.put(error)

    def _refuse_if_closed(self) -> None:
        if self._death is not None:
            raise EngineStoppedError(f"the engine has stopped: {type(self._death).__name__}: {self._death}")
        if not self._taking:
            raise EngineStoppedError("the engine is shutting down and takes no more requests")

    def _refuse_if_full(self, request: Request) -> None:
        """max_num_seqs sequences run; max_queued_requests more may wait."""
        limit = self.engine.config.max_queued_requests
        if limit is None:
            return
        room = limit + (self.engine.config.max_num_seqs or 0)
        if request.params.n > room:
            raise RequestError(
                f"n is {request.params.n}, but at most {room} sequences can run and wait at once "
                f"(--max-num-seqs, --max-queued-requests {limit}): ask for fewer choices",
                param="n",
            )
        waiting = self._unfinished + request.params.n - (room - limit)
        if waiting > limit:
            raise QueueFullError(
                f"{waiting} requests would be waiting and --max-queued-requests is {limit}: try again later"
            )
