"""A request's answer depends on its prompt, parameters and seed alone (float32, exact)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.tiny_engine import tiny_engine
from fixtures.workload import Answer, answer_of, mixed_jobs, run_alone, run_together
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv import Engine, RequestDelta, SamplingParams, join_deltas

JOBS = mixed_jobs(32)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = tiny_engine(num_blocks=128, max_num_seqs=32)
    yield engine
    assert engine.stats().recompilations == 0
    engine.close()


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    """Each request by itself, on an engine without a prefix cache."""
    return run_alone(tiny_engine(num_blocks=128, max_num_seqs=32, enable_prefix_caching=False), JOBS)


def test_the_workload_says_something(alone: list[Answer]) -> None:
    assert len({answer.ids for answer in alone}) > 24
    assert {reason for answer in alone for reason, _ in answer.reasons} == {"stop", "length"}


def test_in_a_batch(engine: Engine, alone: list[Answer]) -> None:
    assert run_together(engine, JOBS) == alone


def test_with_its_prefix_cached(engine: Engine, alone: list[Answer]) -> None:
    run_together(engine, JOBS)
    hits = engine.stats().prefix_cache_hits
    assert run_together(engine, JOBS) == alone
    assert engine.stats().prefix_cache_hits > hits


@pytest.mark.parametrize("chunk", [16, 32])
def test_in_chunks(alone: list[Answer], chunk: int) -> None:
    assert run_together(tiny_engine(num_blocks=128, max_num_seqs=8, max_num_batched_tokens=chunk), JOBS) == alone


def test_after_forced_preemption(alone: list[Answer]) -> None:
    engine = tiny_engine(num_blocks=16, max_num_seqs=8)
    assert run_together(engine, JOBS) == alone
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("shards", [2, 4])
def test_on_several_devices(alone: list[Answer], shards: int) -> None:
    engine = tiny_engine(num_blocks=128, max_num_seqs=32, tensor_parallel_size=shards)
    assert run_together(engine, JOBS) == alone


def test_other_block_size(alone: list[Answer]) -> None:
    assert run_together(tiny_engine(num_blocks=64, block_size=8, max_num_seqs=32), JOBS) == alone


def test_free_pages_may_hold_anything(engine: Engine, alone: list[Answer]) -> None:
    engine.poison_free_pages()
    assert run_together(engine, JOBS) == alone


@settings(max_examples=15)
@given(
    order=st.permutations(range(len(JOBS))), gaps=st.lists(st.integers(0, 4), min_size=len(JOBS), max_size=len(JOBS))
)
def test_arriving_at_any_time(engine: Engine, alone: list[Answer], order: list[int], gaps: list[int]) -> None:
    ids: dict[str, int] = {}
    deltas: dict[int, list[RequestDelta]] = {index: [] for index in order}

    def step() -> None:
        engine.poison_free_pages()
        for delta in engine.step():
            if delta.request_id in ids:
                deltas[ids[delta.request_id]].append(delta)

    for index, gap in zip(order, gaps, strict=True):
        ids[engine.add_request(JOBS[index].prompt, JOBS[index].params)] = index
        engine.add_request("an unseeded neighbour", SamplingParams(max_tokens=gap + 1))
        for _ in range(gap):
            step()
    while engine.has_unfinished:
        step()
    engine.check()
    for index in order:
        assert answer_of(join_deltas(deltas[index])) == alone[index]


def test_on_the_xla_path(alone: list[Answer]) -> None:
    """The engine's own choice on a CPU is native code, where a compiler is found."""
    assert run_together(tiny_engine(num_blocks=128, max_num_seqs=32, attention_backend="reference"), JOBS) == alone


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("cpu_native", "int8"), ("reference", "int8"), ("reference", "fp8_e4m3"), ("reference", "fp8_e5m2")],
)
def test_quantized_pages(backend: str, dtype: str) -> None:
    """Against the same pages alone: in a batch, with the prefix cached, and preempted. A page holds a byte per element."""
    settings = {"attention_backend": backend, "kv_cache_dtype": dtype, "kv_cache_memory_bytes": 400_000}
    jobs = [job for job in JOBS if job.params.prompt_logprobs is None]
    engine = tiny_engine(max_num_seqs=16, max_model_len=64, **settings)
    alone = [run_together(engine, [job])[0] for job in jobs]
    assert run_together(engine, jobs) == alone
    (group,) = engine._runner.pool
    assert group.pages.nbytes == group.pages.size
    engine.poison_free_pages()
    assert run_together(engine, jobs) == alone
