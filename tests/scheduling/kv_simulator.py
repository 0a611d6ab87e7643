"""A simulated device: KV memory that remembers which prefix each cell was computed for, and a scripted model.

Every cell (block, offset) holds the hash of the tokens up to its position. A step first writes the cells of its tokens,
then reads all cells of every sequence and compares. So a block reused too early, a missing write, a write into a shared
block and a hit on the wrong prefix all fail at once, whatever the tokens look like.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from jaxkv.scheduling import BlockLedger, Entry, Scheduler, SchedulerConfig, Sequence, SequenceStatus, StepPlan

VOCAB = 8
STOP_ID = 0


def roll(state: int, token: int) -> int:
    return (state * 6364136223846793005 + token * 2862933555777941757 + 1442695040888963407) % 2**64


def scripted_token(tokens: list[int]) -> int:
    """The model: the next token depends on all tokens before it and on nothing else."""
    state = 1
    for token in tokens:
        state = roll(state, token)
    return (state >> 33) % VOCAB


def expected_output(seq: Sequence) -> list[int]:
    """What a sequence gives when it runs alone, without scheduler or cache."""
    output: list[int] = []
    while len(output) < seq.max_tokens:
        output.append(scripted_token(seq.prompt_ids + output))
        if output[-1] in seq.stop_ids and len(output) > seq.min_tokens:
            break
    return output


class SimulatedDevice:
    """Runs plans on simulated KV memory and checks everything that a plan promises."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.memory: dict[tuple[int, int], int] = {}
        self.held_at_preemption: list[int] = []
        self.num_copies = 0
        self._wipe_new_blocks(scheduler.ledger)
        self._watch_preemption()

    def run(self, plan: StepPlan, burst: int = 1) -> dict[str, list[int]]:
        """The tokens of each entry that samples: burst of them (more than one stands for speculation)."""
        self._check_shape(plan)
        self._copy(plan)
        for entry in plan.entries:
            self._write(entry)
        return {entry.seq.seq_id: self._sample(entry, burst) for entry in plan.entries if self._read(entry)}

    def _check_shape(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert plan.entries
        assert 0 < plan.num_tokens <= config.max_num_batched_tokens
        lengths = [entry.num_tokens for entry in plan.entries]
        assert min(lengths) >= 1
        assert all(length == 1 for length in lengths[: plan.num_single])
        assert all(length > 1 for length in lengths[plan.num_single :])
        slots = [entry.slot for entry in plan.entries]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(config.max_num_seqs))
        assert all(seq.slot is not None for seq in plan.newly_seated)
        assert all(seq.status is SequenceStatus.WAITING and not seq.block_ids for seq in plan.preempted)

    def _copy(self, plan: StepPlan) -> None:
        ledger, targets = self.scheduler.ledger, [target for _, target in plan.copies]
        assert len({*targets}) == len(targets)
        assert not {*targets} & {source for source, _ in plan.copies}
        for source, target in plan.copies:
            assert ledger.state(source) == "held"
            assert ledger.ref_count(target) == 1
            assert not ledger.is_published(target)
            for offset in range(self.scheduler.config.block_size):
                self.memory[target, offset] = self.memory.get((source, offset), 0)
            self.num_copies += 1

    def _write(self, entry: Entry) -> None:
        seq, size, ledger = entry.seq, self.scheduler.config.block_size, self.scheduler.ledger
        assert entry.start == seq.num_computed
        assert entry.end <= seq.num_tokens
        assert entry.samples == (entry.end == seq.num_tokens and seq.max_tokens > 0)
        assert entry.block_ids == seq.block_ids
        assert len(entry.block_ids) == self.scheduler.config.blocks_for(entry.end), "blocks are taken on demand"
        assert len(set(entry.block_ids)) == len(entry.block_ids)
        for position, state in enumerate(prefix_states(seq, entry.end)):
            if position < max(entry.start, entry.write_start):
                continue
            block = entry.block_ids[position // size]
            assert ledger.ref_count(block) == 1, f"write into block {block}, which is shared or not held"
            assert not ledger.is_published(block), f"write into published block {block}"
            self.memory[block, position % size] = state

    def _read(self, entry: Entry) -> bool:
        size = self.scheduler.config.block_size
        for position, state in enumerate(prefix_states(entry.seq, entry.end)):
            cell = entry.block_ids[position // size], position % size
            assert self.memory.get(cell) == state, f"{entry.seq.seq_id} reads a wrong cell {cell} at {position}"
        return entry.samples

    def _sample(self, entry: Entry, burst: int) -> list[int]:
        tokens = entry.seq.tokens(0, entry.end)
        for _ in range(burst):
            tokens.append(scripted_token(tokens))
        return tokens[entry.end :]

    def _wipe_new_blocks(self, ledger: BlockLedger) -> None:
        allocate = ledger.allocate

        def allocate_and_wipe(count: int) -> list[int]:
            blocks = allocate(count)
            for block in blocks:
                for offset in range(self.scheduler.config.block_size):
                    self.memory.pop((block, offset), None)
            return blocks

        ledger.allocate = allocate_and_wipe  # type: ignore[method-assign]

    def _watch_preemption(self) -> None:
        preempt: Callable[..., None] = self.scheduler._preempt

        def checked(seq: Sequence, draft: object) -> None:
            running = self.scheduler._running
            assert self.scheduler.ledger.num_available == 0, "preempted although there are blocks"
            self.held_at_preemption.append(self.scheduler.ledger.num_held)
            assert seq is max(running, key=lambda other: other.order)
            assert seq is not min(running, key=lambda other: other.order)
            preempt(seq, draft)

        self.scheduler._preempt = checked  # type: ignore[method-assign]


def prefix_states(seq: Sequence, end: int) -> list[int]:
    """For each position below end: the hash of everything its keys and values depend on."""
    state = zlib.crc32(repr(seq.cache_salt).encode())
    states = []
    for token in seq.tokens(0, end):
        state = roll(state, token)
        states.append(state)
    return states


def make_scheduler(**changes: object) -> Scheduler:
    limits: dict[str, object] = {
        "num_blocks": 16,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 64,
    }
    return Scheduler(SchedulerConfig(**{**limits, **changes}))  # type: ignore[arg-type]


def make_sequence(name: str, prompt: list[int], max_tokens: int = 4, **changes: object) -> Sequence:
    return Sequence(seq_id=name, **{"request_id": name, **changes}, prompt_ids=prompt, max_tokens=max_tokens)  # type: ignore[arg-type]


def step(scheduler: Scheduler, device: SimulatedDevice, burst: int = 1) -> list[Sequence]:
    """One whole step; returns the sequences that finished. There must be something to do."""
    plan = scheduler.schedule()
    assert plan is not None
    finished = scheduler.commit(plan, device.run(plan, burst))
    scheduler.check()
    return finished


def drain(scheduler: Scheduler, device: SimulatedDevice, max_steps: int = 10_000) -> list[Sequence]:
    """Runs until nothing is left; returns the finished sequences in the order in which they ended."""
    finished: list[Sequence] = []
    for _ in range(max_steps):
        if not scheduler.has_unfinished:
            break
        finished += step(scheduler, device)
    assert_idle(scheduler)
    return finished


def assert_idle(scheduler: Scheduler) -> None:
    """Nothing is left anywhere."""
    scheduler.check()
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.ledger.num_held) == (0, 0, 0)
    assert sorted(scheduler._free_slots) == list(range(scheduler.config.max_num_seqs))
