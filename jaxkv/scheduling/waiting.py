"""The waiting queue: sequences in the order in which they are to be seated."""

from __future__ import annotations

from bisect import bisect_left, insort

from jaxkv.scheduling.sequence import Sequence

_Key = tuple[int, bool, int, int]


def _key(seq: Sequence) -> _Key:
    """Class first; within it the preempted ones (they have output to give), then by arrival."""
    priority, arrival, serial = seq.order
    return priority, seq.num_preemptions == 0, arrival, serial


class WaitingQueue:
    """Sequences sorted by class, preempted ones at the head of theirs. A waiting sequence keeps its place."""

    def __init__(self) -> None:
        self._queue: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, seq: Sequence) -> None:
        insort(self._queue, seq, key=_key)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._queue, _key(seq), key=_key)
        assert self._queue[index] is seq, f"{seq.seq_id} is not waiting"
        del self._queue[index]

    def snapshot(self) -> list[Sequence]:
        """The queue from its head, as it is now."""
        return self._queue.copy()
