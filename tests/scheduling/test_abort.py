"""An abort at any moment: everything is given back at once and the others do not notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scheduling.kv_simulator import SimulatedDevice, assert_idle, expected_output, make_scheduler, make_sequence

from jaxkv.scheduling import Scheduler, Sequence

NUM_STEPS = 28  # more than the workload takes


def workload() -> list[Sequence]:
    """Three requests: a long prompt in chunks, n=3 over a shared prompt, and a short one that starts with it."""
    shared = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    prompts = [("long", [11] * 22), *((f"n3-{i}", shared) for i in range(3)), ("short", shared[:5])]
    return [
        make_sequence(name, prompt, 9, request_id=name[:2], arrival=arrival)
        for arrival, (name, prompt) in enumerate(prompts)
    ]


def run_with(disturb: Callable[[Scheduler, int], None], between: Callable[[Scheduler, int], None]) -> list[Sequence]:
    """Runs the workload in a pool that must preempt; disturb is called before each step, between before each commit."""
    scheduler = make_scheduler(num_blocks=8)
    device = SimulatedDevice(scheduler)
    sequences = workload()
    for seq in sequences:
        scheduler.add(seq)
    for index in range(200):
        if index >= NUM_STEPS and not scheduler.has_unfinished:
            break
        disturb(scheduler, index)
        scheduler.check()
        plan = scheduler.schedule()
        if plan is not None:
            sampled = device.run(plan)
            between(scheduler, index)
            scheduler.check()
            scheduler.commit(plan, sampled)
        scheduler.check()
    assert_idle(scheduler)
    return sequences


def nothing(scheduler: Scheduler, index: int) -> None:
    pass


def test_the_workload_covers_what_it_should() -> None:
    sequences = run_with(nothing, nothing)
    assert sum(seq.num_preemptions for seq in sequences) > 0
    assert sum(seq.num_cached_tokens for seq in sequences) > 0
    assert all(seq.output_ids == expected_output(seq) for seq in sequences)


@pytest.mark.parametrize("during", ["before the step", "before its result"])
@pytest.mark.parametrize("victim", ["long", "n3-0", "n3-1", "n3-2", "short", "all of n3", "everything"])
def test_abort_at_every_step(victim: str, during: str) -> None:
    names = {
        "all of n3": ["n3-0", "n3-1", "n3-2"],
        "everything": [seq.seq_id for seq in workload()],
    }.get(victim, [victim])
    for at in range(NUM_STEPS):

        def abort(scheduler: Scheduler, index: int, at: int = at) -> None:
            if index != at:
                return
            for name in names:
                known = name in scheduler._known
                assert scheduler.abort(name) is known
                assert scheduler.abort(name) is False  # twice
            assert scheduler.abort("unknown") is False

        hooks = (abort, nothing) if during == "before the step" else (nothing, abort)
        for seq in run_with(*hooks):
            expected = expected_output(seq)
            if seq.finish_reason == "abort":
                assert seq.seq_id in names
                assert seq.output_ids == expected[: len(seq.output_ids)]
            else:
                assert seq.output_ids == expected
            assert (seq.block_ids, seq.slot) == ([], None)
