"""A request's answer depends on its prompt, parameters and seed alone (float32, exact)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.tiny_engine import tiny_engine
from fixtures.workload import Answer, mixed_jobs, run_alone, run_together
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv import Engine

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
    texts: dict[int, dict[int, str]] = {index: {} for index in order}
    for index, gap in zip(order, gaps, strict=True):
        ids[engine.add_request(JOBS[index].prompt, JOBS[index].params)] = index
        for _ in range(gap):
            _gather(engine, ids, texts)
    while engine.has_unfinished:
        _gather(engine, ids, texts)
    engine.check()
    for index in order:
        assert tuple(texts[index][i] for i in sorted(texts[index])) == alone[index].texts


def _gather(engine: Engine, ids: dict[str, int], texts: dict[int, dict[int, str]]) -> None:
    for delta in engine.step():
        mine = texts[ids[delta.request_id]]
        for choice in delta.choices:
            mine[choice.index] = mine.get(choice.index, "") + choice.text
