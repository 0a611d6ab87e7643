"""The scheduler: who runs in the next step, on which blocks. Plain Python; knows no arrays and no text.

A step takes, in this order and within the token budget: a token for every decoding sequence, the next chunk of running
prompts, and new sequences. Blocks are taken as a step needs them. When there are none, the sequence that comes last in
order gives its blocks back and is recomputed later; so a sequence is preempted only while every block is held, and the
first in order always advances.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from jaxkv.core.outputs import FinishReason
from jaxkv.scheduling.blocks import BlockLedger
from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.scheduling.errors import SchedulerError
from jaxkv.scheduling.plan import Entry, PlanDraft, StepPlan
from jaxkv.scheduling.sequence import Sequence, SequenceStatus
from jaxkv.scheduling.sequence_blocks import SequenceBlocks
from jaxkv.scheduling.waiting import WaitingQueue

__all__ = ["Scheduler", "SchedulerConfig", "SchedulerCounters"]


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start. Prefix cache numbers are prompt tokens of first admissions."""

    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class Scheduler:
    """Call schedule(), run the plan, commit() its result; abort() and finish() may come at any time in between."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.counters = SchedulerCounters()
        self.weight_version = 0
        """Part of every prefix digest; sequences take the value at the time they are added."""
        self._blocks = SequenceBlocks(config)
        self._known: dict[str, Sequence] = {}
        self._siblings = Counter[str]()  # of each request: how many sequences are known
        self._served: set[str] = set()  # requests of which a sequence has computed the prompt, and ended
        self._running: list[Sequence] = []  # sorted by Sequence.order
        self._waiting = WaitingQueue()
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first
        self._num_added = 0

    @property
    def ledger(self) -> BlockLedger:
        return self._blocks.ledger

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._known)

    def check_fits(self, prompt_len: int, max_tokens: int) -> None:
        """Raises RequestError (code context_length_exceeded) for a sequence that could never run."""
        self.config.check_fits(prompt_len, max_tokens)

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence. Raises RequestError when it can never fit, ValueError when its seq_id is in use."""
        self.check_fits(len(seq.prompt_ids), seq.max_tokens)
        if seq.seq_id in self._known or seq.status is not SequenceStatus.WAITING:
            raise ValueError(f"sequence {seq.seq_id!r} was added before: each needs a new object and a unique seq_id")
        priority = seq.priority if self.config.policy == "priority" else 0
        seq.order = (priority, seq.arrival, self._num_added)
        self._num_added += 1
        self._blocks.start_chain(seq, self.weight_version)
        self._known[seq.seq_id] = seq
        self._siblings[seq.request_id] += 1
        self._waiting.push(seq)

    def abort(self, seq_id: str) -> bool:
        """Ends a sequence that nobody wants any more. False when it is unknown or has ended."""
        return self.finish(seq_id, "abort")

    def finish(self, seq_id: str, reason: FinishReason) -> bool:
        """Ends a sequence from outside (stop string, error) and frees what it holds. False when there is none."""
        seq = self._known.get(seq_id)
        if seq is None:
            return False
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        self._end(seq, reason)
        return True

    def schedule(self) -> StepPlan | None:
        """Plans the next step. None when no sequence is left; raises SchedulerError when none can advance."""
        if not self._known:
            return None
        draft = PlanDraft(self.config.max_num_batched_tokens)
        self._plan_running(draft, decoding=True)
        self._plan_running(draft, decoding=False)
        if not draft.preempted:
            self._admit(draft)
        if not draft.entries:
            raise SchedulerError(f"no sequence can advance: {self._describe()}")
        return draft.finish()

    def commit(self, plan: StepPlan, sampled: Mapping[str, list[int]]) -> list[Sequence]:
        """Takes the result of a plan: sampled tokens (one or more) by seq_id, for every entry that samples.

        Results of sequences that ended meanwhile are dropped. Returns the sequences that end with this step.
        Raises SchedulerError, and changes nothing, when the plan is stale or a result is missing.
        """
        entries = [entry for entry in plan.entries if entry.seq.status is SequenceStatus.RUNNING]
        for entry in entries:
            _check_result(entry, sampled)
        finished = []
        for entry in entries:
            seq = entry.seq
            seq.num_computed = entry.end
            self._blocks.publish(seq)
            reason = self._accept(entry, sampled)
            if reason is not None:
                self._end(seq, reason)
                finished.append(seq)
        return finished

    def forget_computed(self) -> None:
        """The pool's content is lost: running sequences are recomputed, and no cached block is found."""
        for seq in reversed(self._running.copy()):
            self._requeue(seq)
        self._blocks.forget_cached()

    def check(self) -> None:
        """Raises LedgerError when the books do not balance. O(num_blocks); for tests and idle moments."""
        self._blocks.check(self._running)

    def _accept(self, entry: Entry, sampled: Mapping[str, list[int]]) -> FinishReason | None:
        if entry.samples:
            return entry.seq.accept(sampled[entry.seq.seq_id])
        scored = entry.seq.max_tokens == 0 and entry.seq.num_uncomputed == 0
        return "length" if scored else None

    def _plan_running(self, draft: PlanDraft, *, decoding: bool) -> None:
        index = 0
        while index < len(self._running) and draft.budget > 0:  # preemption shortens the list from its end
            seq = self._running[index]
            index += 1
            if (seq.num_uncomputed == 1) is not decoding:
                continue
            num_tokens = self._make_room(seq, min(seq.num_uncomputed, draft.budget), draft)
            if num_tokens > 0:
                draft.add(seq, num_tokens)

    def _make_room(self, seq: Sequence, num_tokens: int, draft: PlanDraft) -> int:
        """Blocks for up to num_tokens tokens of seq, at least for one if any later sequence can be preempted.

        The last in order just keeps its blocks and waits: 0 tokens.
        """
        while (fits := self._blocks.grow(seq, num_tokens)) == 0 and self._running[-1] is not seq:
            self._preempt(self._running[-1], draft)
        return fits

    def _preempt(self, seq: Sequence, draft: PlanDraft) -> None:
        self._requeue(seq)
        draft.drop(seq)

    def _requeue(self, seq: Sequence) -> None:
        self._unseat(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._waiting.push(seq)

    def _admit(self, draft: PlanDraft) -> None:
        """Seats waiting sequences in order, up to the first for which there is no room.

        There is room when the blocks left over cover what the running sequences need next and a margin for their
        growth: otherwise the newcomer would soon be preempted.
        """
        if not (self._waiting and self._free_slots and draft.budget):
            return
        reserved = sum(map(self._blocks.still_needs, self._running))
        sharing = {seq.request_id: seq for seq in self._running if self._blocks.has_sharable_prompt(seq)}
        computing = {seq.request_id for seq in self._running} - sharing.keys() - self._served
        for seq in self._waiting.snapshot():
            if not (self._free_slots and draft.budget):
                return
            if seq.request_id in computing and not seq.needs_prompt_logprobs:
                continue  # its sibling is computing the same prompt, which it will then find in the cache
            hits = self._blocks.match(seq)
            margin = min(len(self._running), self.config.num_blocks // 50)
            if self._blocks.cost_of(seq, hits) + reserved + margin > self.ledger.num_available:
                return
            source = self._blocks.block_to_copy(seq, hits, sharing.get(seq.request_id))
            self._seat(seq, hits, source, draft)
            reserved += self._blocks.still_needs(seq)
            if not self._blocks.has_sharable_prompt(seq) and seq.request_id not in self._served:
                computing.add(seq.request_id)

    def _seat(self, seq: Sequence, hits: list[int], source: int | None, draft: PlanDraft) -> None:
        """source: the block of a sibling that becomes its own, as a copy, behind the hits."""
        self._waiting.remove(seq)
        self._blocks.attach(seq, hits)
        if source is not None:
            draft.copies.append((source, self._blocks.attach_copy(seq)))
        if seq.num_preemptions == 0 and self.config.enable_prefix_caching and not seq.needs_prompt_logprobs:
            seq.num_cached_tokens = seq.num_computed
            self.counters.prefix_cache_queries += len(seq.prompt_ids)
            self.counters.prefix_cache_hits += seq.num_computed
        seq.slot = heapq.heappop(self._free_slots)
        seq.status = SequenceStatus.RUNNING
        insort(self._running, seq, key=_order)
        draft.newly_seated.append(seq)
        draft.add(seq, self._blocks.grow(seq, min(seq.num_uncomputed, draft.budget)))

    def _unseat(self, seq: Sequence) -> None:
        del self._running[bisect_left(self._running, seq.order, key=_order)]
        self._blocks.release(seq)
        assert seq.slot is not None, f"{seq.seq_id} runs without a slot"
        heapq.heappush(self._free_slots, seq.slot)
        seq.slot = None

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.status is SequenceStatus.RUNNING:
            if self._blocks.has_sharable_prompt(seq):
                self._served.add(
                    seq.request_id
                )  # its siblings find what is to be had, and need not wait for one another
            self._unseat(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        del self._known[seq.seq_id]
        self._siblings[seq.request_id] -= 1
        if not self._siblings[seq.request_id]:
            del self._siblings[seq.request_id]
            self._served.discard(seq.request_id)

    def _describe(self) -> str:
        running = ", ".join(f"{seq.seq_id} {seq.num_computed}/{seq.num_tokens}" for seq in self._running[:8])
        head = ", ".join(f"{seq.seq_id} {seq.num_tokens}" for seq in self._waiting.snapshot()[:8])
        return (
            f"{self.num_running} running ({running}), {self.num_waiting} waiting ({head}), "
            f"{len(self._free_slots)} free slots, blocks of {self.config.block_size}: {self.ledger.describe()}"
        )


def _order(seq: Sequence) -> tuple[int, int, int]:
    return seq.order


def _check_result(entry: Entry, sampled: Mapping[str, list[int]]) -> None:
    seq = entry.seq
    if seq.num_computed != entry.start or seq.slot != entry.slot:
        raise SchedulerError(
            f"stale plan: {seq.seq_id} is at token {seq.num_computed} in slot {seq.slot}, the plan started it at "
            f"{entry.start} in slot {entry.slot}; commit each plan once, before the next schedule()"
        )
    if entry.samples and not sampled.get(seq.seq_id):
        raise SchedulerError(f"no sampled token for {seq.seq_id}: every entry that samples needs at least one")
