"""What one step computes: a plan that the runtime turns into arrays and that `Scheduler.commit` takes back."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxkv.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Entry:
    """The tokens of one sequence in a step: positions start .. start + num_tokens - 1.

    samples: the chunk reaches the end of the known tokens, so the token after it is sampled.
    write_start: keys and values of positions below it are NOT written (they lie in shared blocks); start otherwise.
    block_ids: its blocks, enough for every position of the chunk. slot: its seat.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    write_start: int
    block_ids: list[int]
    slot: int

    @property
    def end(self) -> int:
        """Tokens of the sequence that are in its blocks once the step is done (the kv_len of attention)."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Entries of a single token come first (decodes), then longer chunks, each in scheduling order.

    newly_seated: sequences that got a slot in this step; the slot's device state is rebuilt from prompt and output.
    preempted: sequences that lost their blocks and slot in this step.
    copies: (source, target) blocks to copy before anything else of the step; no block is in two pairs, save as a source.
    """

    entries: list[Entry]
    newly_seated: list[Sequence]
    preempted: list[Sequence]
    copies: list[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def num_single(self) -> int:
        """How many of the first entries have exactly one token."""
        return sum(entry.num_tokens == 1 for entry in self.entries)


@dataclass(slots=True)
class PlanDraft:
    """A plan in the making, within a budget of tokens."""

    budget: int
    entries: dict[str, Entry] = field(default_factory=dict)
    newly_seated: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Plans the next num_tokens of a seated sequence that has blocks for them."""
        assert seq.slot is not None, f"{seq.seq_id} has no slot"
        start = seq.num_computed
        self.entries[seq.seq_id] = Entry(
            seq=seq,
            start=start,
            num_tokens=num_tokens,
            samples=num_tokens == seq.num_uncomputed and seq.max_tokens > 0,
            write_start=max(start, seq.num_shared_tokens),
            block_ids=seq.block_ids,
            slot=seq.slot,
        )
        self.budget -= num_tokens

    def drop(self, seq: Sequence) -> None:
        """Takes a preempted sequence's tokens out again."""
        entry = self.entries.pop(seq.seq_id, None)
        if entry is not None:
            self.budget += entry.num_tokens
        self.preempted.append(seq)

    def finish(self) -> StepPlan:
        """The plan, single tokens first."""
        entries = sorted(self.entries.values(), key=lambda entry: entry.num_tokens > 1)
        return StepPlan(entries, self.newly_seated, self.preempted, self.copies)
