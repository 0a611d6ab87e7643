"""Random operations on the scheduler, with every invariant checked after each one.

An operation is a byte, so that hypothesis draws, and shrinks, whole programs cheaply. Outputs are compared with what
each sequence gives alone; the simulated device checks every read and write of KV memory.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scheduling.kv_simulator import (
    STOP_ID,
    SimulatedDevice,
    assert_idle,
    expected_output,
    make_scheduler,
    make_sequence,
)

from jaxkv.core.errors import RequestError
from jaxkv.scheduling import Scheduler, Sequence, SequenceStatus, StepPlan
from jaxkv.scheduling.prefix import root_digest

SALTS = (None, None, None, "a", "")
ROOTS = {root_digest(cache_salt=salt) for salt in SALTS}
PREFIXES = ([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5], [1, 2, 3, 4, 4, 4, 4, 4], [6] * 16)


class Workbench:
    """A scheduler, its device, and everything that was ever asked of them."""

    operations = 0
    preemptions = 0
    hits = 0
    copies = 0

    def __init__(self, **limits: object) -> None:
        self.scheduler: Scheduler = make_scheduler(**limits)
        self.device = SimulatedDevice(self.scheduler)
        self.sequences: list[Sequence] = []
        self.live: list[Sequence] = []
        self.random = random.Random(0)

    def operate(self, code: int) -> None:
        """One operation, chosen by the low bits of a byte; details come from the bits above and from a generator."""
        low, high = code % 16, code // 16
        if low < 3:
            self.add(high)
        elif low == 3:
            self.abort(high)
        elif low < 7:
            self.step(burst=1 + high % 3, abort_before_commit=high // 12)
        else:
            self.step()
        self.check()

    def add(self, code: int) -> None:
        """A new request of one to three sequences; the queue is kept short so that work gets done."""
        if self.scheduler.num_waiting > 8:
            return
        rng = self.random
        prefix = PREFIXES[code % len(PREFIXES)]
        prompt = prefix[: rng.randrange(len(prefix) + 1)] + rng.choices(range(1, 8), k=rng.randrange(4))
        scoring = rng.random() < 0.05
        options: dict[str, object] = {
            "request_id": f"r{len(self.sequences)}",
            "stop_ids": frozenset({STOP_ID}) if rng.random() < 0.5 else frozenset(),
            "min_tokens": rng.randrange(3),
            "priority": rng.randrange(3),
            "cache_salt": rng.choice(SALTS),
            "needs_prompt_logprobs": scoring or rng.random() < 0.1,
        }
        max_tokens = 0 if scoring else rng.randrange(1, 30)
        for _ in range(rng.choice((1, 1, 1, 3))):
            arrival = len(self.sequences)
            seq = make_sequence(f"s{arrival}", prompt, max_tokens, arrival=arrival, **options)
            self.add_or_refuse(seq)

    def add_or_refuse(self, seq: Sequence) -> None:
        config = self.scheduler.config
        fits = seq.prompt_ids and len(seq.prompt_ids) + seq.max_tokens <= config.max_model_len
        if not fits or config.blocks_for(seq.peak_tokens) > config.num_blocks:
            with pytest.raises(RequestError):
                self.scheduler.add(seq)
            return
        self.scheduler.add(seq)
        self.sequences.append(seq)
        self.live.append(seq)

    def abort(self, code: int) -> None:
        """Ends a live sequence as a client or a stop string would, twice, and an unknown one."""
        assert not self.scheduler.abort("unknown")
        if self.live:
            seq = self.live.pop(code % len(self.live))
            reason = "stop" if code % 3 == 0 else "abort"
            assert self.scheduler.finish(seq.seq_id, reason)  # type: ignore[arg-type]
            assert not self.scheduler.abort(seq.seq_id)
            assert seq.finish_reason == reason

    def step(self, burst: int = 1, abort_before_commit: int = 0) -> None:
        plan: StepPlan | None = self.scheduler.schedule()
        assert (plan is None) == (not self.live)
        if plan is None:
            return
        self.scheduler.check()
        sampled = self.device.run(plan, burst)
        for code in range(abort_before_commit):
            self.abort(code)
        for seq in self.scheduler.commit(plan, sampled):
            assert seq.output_ids == expected_output(seq)
            self.live.remove(seq)

    def check(self) -> None:
        type(self).operations += 1
        scheduler, ledger = self.scheduler, self.scheduler.ledger
        scheduler.check()
        assert ledger.num_free + ledger.num_cached + ledger.num_held == ledger.num_blocks
        running = [seq for seq in self.live if seq.status is SequenceStatus.RUNNING]
        waiting = [seq for seq in self.live if seq.status is SequenceStatus.WAITING]
        assert (len(running), len(waiting)) == (scheduler.num_running, scheduler.num_waiting)
        slots = [seq.slot for seq in running]
        assert sorted([*slots, *scheduler._free_slots]) == list(range(scheduler.config.max_num_seqs))  # type: ignore[type-var]
        assert all(not seq.block_ids and seq.slot is None for seq in waiting)
        self.check_eviction_order()

    def check_eviction_order(self) -> None:
        """A cached block's parent is in the index, and is held or evicted later: no cached block is out of reach."""
        index, ledger = self.scheduler._blocks._index, self.scheduler.ledger
        parents = index.parents()
        place = {block: position for position, block in enumerate(ledger.cached_blocks())}
        for block, position in place.items():
            if parents[block] not in ROOTS:
                parent = index.block_of(parents[block])
                assert parent is not None
                assert ledger.state(parent) == "held" or place[parent] > position

    def finish(self) -> None:
        """Drains with a watchdog, then compares every output and expects nothing to be left."""
        work = sum(seq.peak_tokens for seq in self.live)
        for _ in range(2 * work + 1):
            if not self.live:
                break
            self.step()
            self.check()
        assert_idle(self.scheduler)
        for seq in self.sequences:
            assert seq.output_ids == expected_output(seq)[: len(seq.output_ids)]
            assert seq.finish_reason is not None
        type(self).preemptions += self.scheduler.counters.num_preemptions
        type(self).hits += self.scheduler.counters.prefix_cache_hits
        type(self).copies += self.device.num_copies


class SchedulerMachine(RuleBasedStateMachine):
    bench: Workbench

    @initialize(
        num_blocks=st.integers(5, 24),
        block_size=st.sampled_from([1, 3, 4, 8]),
        max_num_seqs=st.integers(1, 6),
        extra_tokens=st.integers(0, 20),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def build(
        self, num_blocks: int, block_size: int, max_num_seqs: int, extra_tokens: int, policy: str, caching: bool
    ) -> None:
        self.bench = Workbench(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_model_len=40,
            policy=policy,
            enable_prefix_caching=caching,
        )

    @rule(seed=st.integers(0, 2**16), program=st.binary(min_size=10, max_size=60))
    def operate(self, seed: int, program: bytes) -> None:
        self.bench.random.seed(seed)
        for code in program:
            self.bench.operate(code)

    @rule(code=st.integers(0, 255))
    def add(self, code: int) -> None:
        self.bench.add(code)
        self.bench.check()

    @precondition(lambda self: self.bench.live)
    @rule(code=st.integers(0, 255))
    def abort(self, code: int) -> None:
        self.bench.abort(code)
        self.bench.check()

    @rule(burst=st.integers(1, 3), abort_before_commit=st.integers(0, 2))
    def step(self, burst: int, abort_before_commit: int) -> None:
        self.bench.step(burst, abort_before_commit)
        self.bench.check()

    @invariant()
    def balanced(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.ledger.check()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.finish()


def run_machine(max_examples: int, *, derandomize: bool, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    Workbench.operations = Workbench.preemptions = Workbench.hits = Workbench.copies = 0
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            derandomize=derandomize,
            phases=phases,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_hundred_thousand_random_operations() -> None:
    run_machine(750, derandomize=True, phases=(Phase.generate,))  # shrinking a failure is left to the slow test
    assert Workbench.operations >= 100_000
    assert Workbench.preemptions >= 500
    assert Workbench.hits >= 10_000
    assert Workbench.copies >= 500


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_other_random_operations() -> None:
    run_machine(3_000, derandomize=False)
