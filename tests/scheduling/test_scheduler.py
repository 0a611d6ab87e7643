"""Steps of the scheduler: order, chunks, seats, ends."""

from __future__ import annotations

import pytest
from scheduling.kv_simulator import (
    SimulatedDevice,
    assert_idle,
    drain,
    expected_output,
    make_scheduler,
    make_sequence,
    step,
)

from jaxkv.core.errors import ConfigError
from jaxkv.scheduling import Scheduler, SchedulerConfig, SchedulerError, Sequence, SequenceStatus, StepPlan


def shape(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    assert plan is not None
    return [(entry.seq.seq_id, entry.start, entry.num_tokens, entry.samples) for entry in plan.entries]


def next_shape(scheduler: Scheduler, device: SimulatedDevice) -> list[tuple[str, int, int, bool]]:
    plan = scheduler.schedule()
    planned = shape(plan)
    assert plan is not None
    scheduler.commit(plan, device.run(plan))
    return planned


def test_idle_plans_nothing() -> None:
    assert_idle(make_scheduler())


def test_decodes_come_first_then_chunks_then_new_sequences() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, num_blocks=32)
    device = SimulatedDevice(scheduler)
    scheduler.add(make_sequence("a", [1, 2, 3], arrival=0))
    assert next_shape(scheduler, device) == [("a", 0, 3, True)]
    scheduler.add(make_sequence("b", [5] * 13, arrival=1))
    scheduler.add(make_sequence("c", [6] * 3, arrival=2))
    assert next_shape(scheduler, device) == [("a", 3, 1, True), ("b", 0, 7, False)]
    assert next_shape(scheduler, device) == [("a", 4, 1, True), ("c", 0, 1, False), ("b", 7, 6, True)]
    assert next_shape(scheduler, device) == [("a", 5, 1, True), ("b", 13, 1, True), ("c", 1, 2, True)]
    drain(scheduler, device)


def test_seats_are_limited_and_reused() -> None:
    scheduler = make_scheduler(max_num_seqs=2, num_blocks=64)
    device = SimulatedDevice(scheduler)
    for index in range(5):
        scheduler.add(make_sequence(f"s{index}", [index + 1] * 2, max_tokens=1 + index % 2, arrival=index))
    seats: list[set[int | None]] = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        assert plan is not None
        seats.append({seq.slot for seq in plan.newly_seated})
        assert scheduler.num_running <= 2
        scheduler.commit(plan, device.run(plan))
    assert seats == [{0, 1}, {0}, {0, 1}, set()]


def test_fcfs_serves_in_order_of_arrival_and_ignores_priority() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for arrival, priority in ((2, 0), (0, 9), (1, 5)):
        scheduler.add(make_sequence(f"s{arrival}", [1, 2], priority=priority, arrival=arrival))
    assert [seq.seq_id for seq in drain(scheduler, SimulatedDevice(scheduler))] == ["s0", "s1", "s2"]


def test_priority_serves_lower_first_and_ties_by_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    for arrival, priority in ((0, 5), (1, -1), (2, 5), (3, 0)):
        scheduler.add(make_sequence(f"s{arrival}", [1, 2], priority=priority, arrival=arrival))
    assert [seq.seq_id for seq in drain(scheduler, SimulatedDevice(scheduler))] == ["s1", "s3", "s0", "s2"]


def test_outputs_are_those_of_the_sequence_alone() -> None:
    scheduler = make_scheduler()
    sequences = [
        make_sequence(f"s{i}", [i % 3 + 1] * (i + 1), max_tokens=6, stop_ids=frozenset({0}), arrival=i)
        for i in range(12)
    ]
    for seq in sequences:
        scheduler.add(seq)
    drain(scheduler, SimulatedDevice(scheduler))
    for seq in sequences:
        assert seq.output_ids == expected_output(seq)
        assert seq.finish_reason == ("stop" if seq.output_ids[-1] == 0 else "length")
        assert seq.stop_token == (0 if seq.finish_reason == "stop" else None)


def test_a_finished_sequence_holds_nothing() -> None:
    scheduler = make_scheduler()
    seq = make_sequence("a", [1] * 9, max_tokens=1)
    scheduler.add(seq)
    drain(scheduler, SimulatedDevice(scheduler))
    assert (seq.status, seq.block_ids, seq.slot) == (SequenceStatus.FINISHED, [], None)
    assert scheduler.ledger.num_cached == 2


def test_scoring_computes_the_prompt_and_samples_nothing() -> None:
    scheduler = make_scheduler(max_model_len=16)
    device = SimulatedDevice(scheduler)
    seq = make_sequence("score", [1] * 16, max_tokens=0, needs_prompt_logprobs=True)
    scheduler.add(seq)
    assert next_shape(scheduler, device) == [("score", 0, 8, False)]
    assert next_shape(scheduler, device) == [("score", 8, 8, False)]
    assert (seq.finish_reason, seq.output_ids) == ("length", [])
    assert_idle(scheduler)


def test_several_sampled_tokens_end_at_the_stop() -> None:
    scheduler = make_scheduler()
    seq = make_sequence("a", [1], max_tokens=10, stop_ids=frozenset({5}))
    scheduler.add(seq)
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.commit(plan, {"a": [3, 4]}) == []
    plan = scheduler.schedule()
    assert shape(plan) == [("a", 1, 2, True)]
    assert plan is not None
    assert scheduler.commit(plan, {"a": [4, 5, 6]}) == [seq]
    assert (seq.output_ids, seq.stop_token, seq.finish_reason) == ([3, 4, 4, 5], 5, "stop")
    assert_idle(scheduler)


@pytest.mark.parametrize("burst", [2, 3])
def test_several_sampled_tokens_per_step_change_no_output(burst: int) -> None:
    scheduler = make_scheduler()
    device = SimulatedDevice(scheduler)
    sequences = [make_sequence(f"s{i}", [i, 2, 3], max_tokens=7, arrival=i) for i in range(5)]
    for seq in sequences:
        scheduler.add(seq)
    while scheduler.has_unfinished:
        step(scheduler, device, burst)
    assert [seq.output_ids for seq in sequences] == [expected_output(seq) for seq in sequences]


def test_a_stop_string_ends_a_sequence_from_outside() -> None:
    scheduler = make_scheduler()
    device = SimulatedDevice(scheduler)
    seq = make_sequence("a", [1, 2], max_tokens=9)
    scheduler.add(seq)
    step(scheduler, device)
    assert scheduler.finish("a", "stop")
    assert seq.finish_reason == "stop"
    assert len(seq.output_ids) == 1
    assert not scheduler.finish("a", "stop")
    assert_idle(scheduler)


def test_results_of_ended_sequences_are_dropped() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_sequence(name, [1, 2], max_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.abort("a")
    scheduler.finish("b", "error")
    assert [seq.seq_id for seq in scheduler.commit(plan, {"a": [1], "c": [1]})] == ["c"]
    assert plan.entries[0].seq.output_ids == []
    assert_idle(scheduler)


def test_a_result_that_is_missing_or_stale_changes_nothing() -> None:
    scheduler = make_scheduler()
    seq = make_sequence("a", [1, 2])
    scheduler.add(seq)
    plan = scheduler.schedule()
    assert plan is not None
    for sampled in ({}, {"a": []}):
        with pytest.raises(SchedulerError, match="no sampled token for a"):
            scheduler.commit(plan, sampled)
    assert seq.num_computed == 0
    scheduler.commit(plan, {"a": [1]})
    with pytest.raises(SchedulerError, match="stale plan: a"):
        scheduler.commit(plan, {"a": [1]})
    assert seq.output_ids == [1]


def test_planning_again_without_a_result_gives_the_same_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", [1] * 11))
    first, held = shape(scheduler.schedule()), scheduler.ledger.num_held
    assert shape(scheduler.schedule()) == first
    assert scheduler.ledger.num_held == held


def test_a_sequence_is_added_once() -> None:
    scheduler = make_scheduler()
    seq = make_sequence("a", [1])
    scheduler.add(seq)
    with pytest.raises(ValueError, match="added before"):
        scheduler.add(make_sequence("a", [2]))
    scheduler.abort("a")
    with pytest.raises(ValueError, match="added before"):
        scheduler.add(seq)
    scheduler.add(make_sequence("a", [2]))
    drain(scheduler, SimulatedDevice(scheduler))


def test_a_step_that_cannot_advance_names_the_state() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", [1] * 9))
    scheduler.ledger.allocate(16)
    with pytest.raises(SchedulerError, match=r"no sequence can advance: 0 running .* 1 waiting \(a 9\).*held 16 of 16"):
        scheduler.schedule()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0),
        ("block_size", 0),
        ("max_num_seqs", 0),
        ("max_model_len", 0),
        ("max_num_batched_tokens", 3),
        ("policy", "random"),
    ],
)
def test_impossible_limits_are_refused(field: str, value: object) -> None:
    limits = {"num_blocks": 4, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 16}
    with pytest.raises(ConfigError, match=field):
        SchedulerConfig(**{**limits, field: value})  # type: ignore[arg-type]


def test_siblings_wait_for_the_first_and_then_share_its_prompt() -> None:
    scheduler = make_scheduler(num_blocks=32)
    device = SimulatedDevice(scheduler)
    prompt = [1, 2, 3, 4] * 3 + [5]
    siblings = [make_sequence(f"n{i}", prompt, max_tokens=3, request_id="r", arrival=i) for i in range(3)]
    other = make_sequence("other", [7], max_tokens=3, arrival=3)
    for seq in [*siblings, other]:
        scheduler.add(seq)
    assert next_shape(scheduler, device) == [("n0", 0, 8, False)]
    assert next_shape(scheduler, device) == [("other", 0, 1, True), ("n0", 8, 5, True)]
    assert next_shape(scheduler, device) == [
        ("n0", 13, 1, True),
        ("other", 1, 1, True),
        ("n1", 12, 1, True),
        ("n2", 12, 1, True),
    ]
    assert len({tuple(seq.block_ids[:3]) for seq in siblings}) == 1
    assert [seq.num_cached_tokens for seq in siblings] == [0, 12, 12]
    drain(scheduler, device)


def test_siblings_do_not_wait_when_there_is_nothing_to_share() -> None:
    for changes, prompt in (({"enable_prefix_caching": False}, [1] * 4), ({}, [1])):
        scheduler = make_scheduler(max_num_batched_tokens=16, **changes)
        for index in range(3):
            scheduler.add(make_sequence(f"n{index}", prompt, request_id="r", arrival=index))
        assert len(shape(scheduler.schedule())) == 3


def test_a_sibling_gets_a_copy_of_the_block_in_which_the_prompt_ends() -> None:
    """Its source goes on in the same step: what it writes there lies behind the prompt."""
    scheduler = make_scheduler(num_blocks=32, max_num_batched_tokens=16)
    device = SimulatedDevice(scheduler)
    siblings = [make_sequence(f"n{i}", [1, 2, 3, 4, 5, 6, 7], request_id="r", arrival=i) for i in range(3)]
    for seq in siblings:
        scheduler.add(seq)
    assert next_shape(scheduler, device) == [("n0", 0, 7, True)]
    plan = scheduler.schedule()
    assert shape(plan) == [("n0", 7, 1, True), ("n1", 6, 1, True), ("n2", 6, 1, True)]
    first, last = siblings[0].block_ids
    assert plan.copies == [(last, siblings[1].block_ids[1]), (last, siblings[2].block_ids[1])]
    assert [seq.block_ids[0] for seq in siblings] == [first] * 3
    assert [seq.num_cached_tokens for seq in siblings] == [0, 6, 6]
    scheduler.commit(plan, device.run(plan))
    drain(scheduler, device)
    assert [seq.output_ids for seq in siblings] == [expected_output(siblings[0])] * 3


def test_a_sibling_takes_over_when_the_first_is_aborted() -> None:
    scheduler = make_scheduler(num_blocks=32)
    device = SimulatedDevice(scheduler)
    siblings: list[Sequence] = [make_sequence(f"n{i}", [1] * 12, request_id="r", arrival=i) for i in range(3)]
    for seq in siblings:
        scheduler.add(seq)
    step(scheduler, device)
    scheduler.abort("n0")
    drain(scheduler, device)
    assert [seq.output_ids for seq in siblings[1:]] == [expected_output(siblings[1])] * 2


def test_siblings_wait_for_the_first_alone() -> None:
    """It ends with its first token, before anyone can copy from it: the others do not then wait for one another."""
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=64, max_num_seqs=8)
    device = SimulatedDevice(scheduler)
    for i in range(8):
        scheduler.add(make_sequence(f"n{i}", [1, 2, 3, 4, 5, 6, 7], request_id="r", arrival=i, max_tokens=1))
    assert len(next_shape(scheduler, device)) == 1
    assert len(next_shape(scheduler, device)) == 7
    assert_idle(scheduler)
