"""Sequences that share prefixes: who finds what, and that nobody finds what it must not."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling.kv_simulator import SimulatedDevice, drain, expected_output, make_scheduler, make_sequence, step

from jaxkv.scheduling import Scheduler, Sequence, sequence_blocks


@pytest.fixture
def scheduler() -> Scheduler:
    return make_scheduler(num_blocks=32, max_num_batched_tokens=32)


@pytest.fixture
def device(scheduler: Scheduler) -> SimulatedDevice:
    return SimulatedDevice(scheduler)


def run(
    scheduler: Scheduler, device: SimulatedDevice, name: str, prompt: list[int], max_tokens: int = 2, **changes: Any
) -> Sequence:
    seq = make_sequence(name, prompt, max_tokens, **changes)
    scheduler.add(seq)
    drain(scheduler, device)
    assert seq.output_ids == expected_output(seq)
    return seq


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [
        (range(10), range(10), 8),
        (range(8), range(8), 7),
        (range(4), range(4), 3),
        (range(12), range(8), 7),
        (range(12), range(6), 4),
        (range(8), range(30), 8),
        (range(3), range(3), 0),
        (range(8), [*range(7), 99], 4),
        (range(8), range(1, 9), 0),
    ],
)
def test_the_longest_cached_prefix_is_used(
    scheduler: Scheduler, device: SimulatedDevice, first: list[int], second: list[int], cached: int
) -> None:
    assert run(scheduler, device, "first", list(first)).num_cached_tokens == 0
    assert run(scheduler, device, "second", list(second)).num_cached_tokens == cached
    assert scheduler.counters.prefix_cache_queries == len(first) + len(second)
    assert scheduler.counters.prefix_cache_hits == cached


def test_a_fully_cached_prompt_recomputes_its_last_token_and_writes_nothing(
    scheduler: Scheduler, device: SimulatedDevice
) -> None:
    run(scheduler, device, "first", [1, 2, 3, 4, 5, 6, 7, 8])
    scheduler.add(make_sequence("second", [1, 2, 3, 4, 5, 6, 7, 8]))
    plan = scheduler.schedule()
    assert plan is not None
    [entry] = plan.entries
    assert (entry.start, entry.num_tokens, entry.write_start, entry.samples) == (7, 1, 8, True)
    assert len(entry.block_ids) == 2
    scheduler.commit(plan, device.run(plan))
    plan = scheduler.schedule()
    assert plan is not None
    assert (plan.entries[0].start, plan.entries[0].write_start, len(plan.entries[0].block_ids)) == (8, 8, 3)


def test_output_blocks_are_found_by_the_next_turn(scheduler: Scheduler, device: SimulatedDevice) -> None:
    first = run(scheduler, device, "first", [1, 2, 3], max_tokens=10)
    turn = first.prompt_ids + first.output_ids + [4, 4]
    assert run(scheduler, device, "second", turn).num_cached_tokens == 12


def test_salts_isolate(scheduler: Scheduler, device: SimulatedDevice) -> None:
    prompt = list(range(9))
    salts = [None, "", "a", "b"]
    for salt in salts:
        assert run(scheduler, device, f"first {salt}", prompt, cache_salt=salt).num_cached_tokens == 0
    for salt in salts:
        assert run(scheduler, device, f"second {salt}", prompt, cache_salt=salt).num_cached_tokens == 8


def test_a_new_weight_version_finds_nothing_old(scheduler: Scheduler, device: SimulatedDevice) -> None:
    run(scheduler, device, "old", list(range(9)))
    scheduler.weight_version = 1
    assert run(scheduler, device, "new", list(range(9))).num_cached_tokens == 0
    assert run(scheduler, device, "newer", list(range(9))).num_cached_tokens == 8


def test_prompt_logprobs_take_no_hit_but_leave_blocks_for_others(scheduler: Scheduler, device: SimulatedDevice) -> None:
    for name in ("first", "second"):
        assert run(scheduler, device, name, list(range(9)), needs_prompt_logprobs=True).num_cached_tokens == 0
    assert run(scheduler, device, "third", list(range(9))).num_cached_tokens == 8
    assert scheduler.counters.prefix_cache_queries == 9


def test_nothing_is_shared_with_caching_off() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    device = SimulatedDevice(scheduler)
    for name in ("first", "second"):
        assert run(scheduler, device, name, list(range(9))).num_cached_tokens == 0
    assert scheduler.ledger.num_free == scheduler.ledger.num_blocks
    assert scheduler.counters.prefix_cache_queries == 0


def test_a_block_is_found_only_after_its_step_is_committed(scheduler: Scheduler, device: SimulatedDevice) -> None:
    scheduler.add(make_sequence("first", list(range(8))))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.abort("first")
    scheduler.commit(plan, {})
    assert scheduler.ledger.num_cached == 0
    assert run(scheduler, device, "second", list(range(8))).num_cached_tokens == 0


def test_two_that_compute_the_same_block_at_once_each_keep_their_own(
    scheduler: Scheduler, device: SimulatedDevice
) -> None:
    twins = [make_sequence(f"t{i}", list(range(8)), max_tokens=6, arrival=i) for i in range(2)]
    for seq in twins:
        scheduler.add(seq)
    step(scheduler, device)
    assert not set(twins[0].block_ids) & set(twins[1].block_ids)
    assert [scheduler.ledger.is_published(block) for block in twins[0].block_ids] == [True, True]
    assert [scheduler.ledger.is_published(block) for block in twins[1].block_ids] == [False, False]
    drain(scheduler, device)
    assert twins[0].output_ids == twins[1].output_ids == expected_output(twins[0])
    assert scheduler.ledger.num_cached == 3


def test_later_blocks_of_a_chain_are_evicted_first() -> None:
    scheduler = make_scheduler(num_blocks=8, max_num_batched_tokens=32)
    device = SimulatedDevice(scheduler)
    run(scheduler, device, "old", list(range(16)), max_tokens=1)
    run(scheduler, device, "new", [50, 51, 52, 53], max_tokens=1)
    assert (scheduler.ledger.num_free, scheduler.ledger.num_cached) == (3, 5)
    run(scheduler, device, "eater", [60] * 17, max_tokens=1, cache_salt="eater")
    assert run(scheduler, device, "new again", [50, 51, 52, 53], max_tokens=1).num_cached_tokens == 3
    assert run(scheduler, device, "old again", list(range(16)), max_tokens=1).num_cached_tokens == 8


def test_using_a_prefix_makes_it_young() -> None:
    scheduler = make_scheduler(num_blocks=4)
    device = SimulatedDevice(scheduler)
    run(scheduler, device, "a", [1] * 4, max_tokens=1)
    run(scheduler, device, "b", [2] * 4, max_tokens=1)
    run(scheduler, device, "a again", [1] * 4, max_tokens=1)
    run(scheduler, device, "eater", [3] * 12, max_tokens=1)
    assert run(scheduler, device, "a survives", [1] * 4, max_tokens=1).num_cached_tokens == 3
    assert run(scheduler, device, "b is gone", [2] * 4, max_tokens=1).num_cached_tokens == 0


def test_each_block_is_hashed_once(
    scheduler: Scheduler, device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    hash_block = sequence_blocks.block_digest

    def counting(parent: bytes, tokens: list[int]) -> bytes:
        nonlocal calls
        calls += 1
        return hash_block(parent, tokens)

    monkeypatch.setattr(sequence_blocks, "block_digest", counting)
    run(scheduler, device, "a", list(range(20)), max_tokens=21)
    assert calls == 10
