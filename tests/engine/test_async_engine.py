"""The engine on its own thread: many streams, readers that leave, full queues, draining, dying."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.tiny_engine import tiny_engine
from fixtures.workload import answer_of, mixed_jobs, run_alone

from jaxkv import (
    AsyncEngine,
    Engine,
    EngineStoppedError,
    QueueFullError,
    RequestDelta,
    RequestError,
    SamplingParams,
    join_deltas,
)

LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)


@pytest.fixture(scope="module")
def plain_engine() -> Engine:
    return tiny_engine(num_blocks=32)


@pytest.fixture
def engine(plain_engine: Engine) -> Iterator[AsyncEngine]:
    served = AsyncEngine(plain_engine)
    served.start()
    yield served
    served.shutdown()
    for request_id in plain_engine.unfinished:
        plain_engine.abort(request_id)
    plain_engine.step()
    plain_engine.check()


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams) -> list[RequestDelta]:
    return [delta async for delta in engine.generate(prompt, params)]


@pytest.mark.needs("float32 pages")  # for equal logprobs
def test_many_streams_at_once(engine: AsyncEngine, plain_engine: Engine) -> None:
    jobs = mixed_jobs(16, seed=3)

    async def all_of_them() -> list[list[RequestDelta]]:
        return await asyncio.gather(*(collect(engine, job.prompt, job.params) for job in jobs))

    streamed = [answer_of(join_deltas(deltas)) for deltas in asyncio.run(all_of_them())]
    engine.shutdown()
    assert streamed == run_alone(plain_engine, jobs)


def test_readers_that_leave_at_random_points(engine: AsyncEngine, plain_engine: Engine) -> None:
    rng = random.Random(0)

    async def leave_after(count: int) -> None:
        seen = 0
        stream = engine.generate("a prompt that nobody waits for", LONG)
        async for _ in stream:
            seen += 1
            if seen >= count:
                break
        await stream.aclose()  # type: ignore[attr-defined]

    async def crowd() -> None:
        tasks = [asyncio.create_task(leave_after(rng.randint(1, 20))) for _ in range(60)]
        for task in rng.sample(tasks, 20):
            await asyncio.sleep(0.002)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await wait_until(lambda: engine.stats().num_running == engine.stats().num_waiting == 0)

    asyncio.run(crowd())
    assert engine.num_unfinished == 0
    assert engine.stats().num_blocks_held == 0


async def wait_until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.01)


def test_errors_before_anything_is_queued(engine: AsyncEngine) -> None:
    async def bad() -> None:
        with pytest.raises(RequestError):
            await engine.prepare("")
        request = await engine.prepare("x", LONG, request_id="twice")
        stream = engine.submit(request)
        with pytest.raises(RequestError, match="in use"):
            engine.submit(request)
        await stream.aclose()

    asyncio.run(bad())


def test_an_id_may_be_used_again_after_an_abort(engine: AsyncEngine) -> None:
    async def again() -> int:
        request = await engine.prepare("x", SamplingParams(temperature=0.0, max_tokens=3), request_id="mine")
        for _ in range(20):
            await engine.submit(request).aclose()
        return len([delta async for delta in engine.submit(request)])

    assert asyncio.run(again()) > 0


def test_a_full_queue(plain_engine: Engine) -> None:
    import dataclasses

    config = plain_engine.config
    plain_engine.config = dataclasses.replace(config, max_queued_requests=2)
    engine = AsyncEngine(plain_engine)  # not started, so that nothing leaves the queue

    async def fill() -> None:
        request = await engine.prepare("x", SamplingParams(max_tokens=5, n=8))
        streams = [engine.submit(request)]
        for name in ("first", "second"):
            streams.append(engine.submit(await engine.prepare("x", SamplingParams(max_tokens=5), request_id=name)))
        with pytest.raises(QueueFullError, match="--max-queued-requests is 2") as refused:
            engine.submit(await engine.prepare("x", SamplingParams(max_tokens=5)))
        assert refused.value.retry_after >= 1
        await streams[1].aclose()

    asyncio.run(fill())
    plain_engine.config = config


def test_draining_lets_the_running_finish(engine: AsyncEngine) -> None:
    async def drain() -> list[RequestDelta]:
        running = asyncio.create_task(collect(engine, "go on", LONG))
        await wait_until(lambda: engine.num_unfinished)
        drained = asyncio.create_task(engine.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(EngineStoppedError, match="shutting down"):
            await collect(engine, "too late", LONG)
        assert await drained
        return await running

    assert sum(len(choice.token_ids) for delta in asyncio.run(drain()) for choice in delta.choices) == 50


def test_shutdown_ends_open_streams(engine: AsyncEngine) -> None:
    async def cut() -> None:
        task = asyncio.create_task(collect(engine, "go on", LONG))
        await wait_until(lambda: engine.num_unfinished)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineStoppedError):
            await task

    asyncio.run(cut())
    assert not engine.is_ready


def test_a_loop_that_dies_tells_everybody(plain_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncEngine(plain_engine)
    engine.start()

    def broken() -> list[RequestDelta]:
        raise MemoryError("no more")

    async def die() -> None:
        monkeypatch.setattr(plain_engine, "step", broken)
        with pytest.raises(EngineStoppedError, match="MemoryError: no more"):
            await collect(engine, "x", LONG)
        await wait_until(lambda: not engine.is_ready)
        with pytest.raises(EngineStoppedError, match="has stopped"):
            await collect(engine, "x", LONG)

    asyncio.run(die())
    monkeypatch.undo()
    engine.shutdown()
    for request_id in plain_engine.unfinished:
        plain_engine.abort(request_id)
    plain_engine.step()


def test_the_heartbeat_shows_a_step_that_hangs(plain_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncEngine(plain_engine)
    release = threading.Event()
    step = plain_engine.step

    def hang() -> list[RequestDelta]:
        release.wait(20)
        return step()

    monkeypatch.setattr(plain_engine, "step", hang)
    engine.start()

    async def watch() -> None:
        task = asyncio.create_task(collect(engine, "x", SamplingParams(max_tokens=1)))
        await wait_until(lambda: engine.heartbeat_age() > 1.0)
        release.set()
        await task
        await wait_until(lambda: engine.heartbeat_age() < 1.0)

    asyncio.run(watch())
    engine.shutdown()


def test_step_listeners_see_every_step(engine: AsyncEngine) -> None:
    seen: list[int] = []
    engine.on_step.append(lambda step, _: seen.append(step.num_tokens))
    asyncio.run(collect(engine, "abcd", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)))
    engine.shutdown()
    assert seen[:4] == [4, 1, 1, 1]
