"""What scheduling costs: it runs on the host between two steps of the device."""

from __future__ import annotations

import time

from scheduling.kv_simulator import make_scheduler, make_sequence

from jaxkv.scheduling import Scheduler


def best_step_seconds(scheduler: Scheduler, steps: int) -> float:
    """The cheapest of some steps: noise of the machine only adds."""
    costs = []
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, {entry.seq.seq_id: [7] for entry in plan.entries if entry.samples})
        costs.append(time.perf_counter() - start)
    return min(costs)


def test_a_step_over_256_running_sequences_costs_two_milliseconds_at_most() -> None:
    scheduler = make_scheduler(
        num_blocks=20_000, block_size=16, max_num_seqs=256, max_num_batched_tokens=8_192, max_model_len=4_096
    )
    for index in range(2_000):
        scheduler.add(make_sequence(f"s{index}", [index] * 100, max_tokens=400, arrival=index))
    while scheduler.num_running < 256:
        best_step_seconds(scheduler, 1)
    assert best_step_seconds(scheduler, 50) < 0.002
    assert scheduler.num_waiting == 2_000 - 256
