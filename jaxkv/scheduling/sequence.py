"""One sequence: its tokens, its limits, and how far it has come. A request with n > 1 is n sequences."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxkv.core.outputs import FinishReason


class SequenceStatus(enum.Enum):
    """Where a sequence stands. A preempted one is WAITING again, with its output kept."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A sequence that the scheduler runs. The caller sets the first group; the scheduler owns the rest.

    seq_id: unique among unfinished sequences. request_id: shared by the siblings of one request (n > 1).
    prompt_ids: at least one token; not changed after `Scheduler.add`.
    max_tokens: outputs at most; 0 computes the prompt and samples nothing (prompt scoring).
    stop_ids: an output token among them ends the sequence, unless fewer than min_tokens outputs came before it.
    priority: lower runs first (policy "priority" only). arrival: a counter that grows with every sequence.
    cache_salt: sequences share cached prefixes only with equal salts.
    needs_prompt_logprobs: every prompt position is computed, so no cached prefix is used.
    """

    seq_id: str
    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    priority: int = 0
    arrival: int = 0
    cache_salt: str | None = None
    needs_prompt_logprobs: bool = False

    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    output_ids: list[int] = field(default_factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_token: int | None = field(default=None, init=False)
    """The id of stop_ids that ended it."""
    slot: int | None = field(default=None, init=False)
    """Its seat, 0 .. max_num_seqs - 1, while it runs."""
    block_ids: list[int] = field(default_factory=list, init=False)
    """Block i holds the positions from i * block_size on."""
    num_computed: int = field(default=0, init=False)
    """Tokens from the start whose keys and values are in its blocks (of committed steps)."""
    num_shared_tokens: int = field(default=0, init=False)
    """Tokens from the start that lie in blocks of the prefix cache: never written by this sequence."""
    num_cached_tokens: int = field(default=0, init=False)
    """Prompt tokens that its first admission found computed."""
    num_preemptions: int = field(default=0, init=False)

    order: tuple[int, int, int] = field(default=(0, 0, 0), init=False, repr=False)
    """Place among all sequences, smallest first: (priority or 0, arrival, serial number)."""
    root_digest: bytes = field(default=b"", init=False, repr=False)
    digests: list[bytes] = field(default_factory=list, init=False, repr=False)
    """Chain digests of its first full blocks, as far as anyone asked for them."""
    num_published: int = field(default=0, init=False, repr=False)
    """Leading blocks that are computed, full and offered to the prefix index."""

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that are still to be computed; 1 for a sequence that decodes."""
        return len(self.prompt_ids) + len(self.output_ids) - self.num_computed

    @property
    def peak_tokens(self) -> int:
        """Positions that ever need a place in a block: the last output token is never fed back."""
        return len(self.prompt_ids) + max(self.max_tokens - 1, 0)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions start .. stop - 1, prompt first, then output."""
        split = len(self.prompt_ids)
        if stop <= split:
            return self.prompt_ids[start:stop]
        if start >= split:
            return self.output_ids[start - split : stop - split]
        return self.prompt_ids[start:] + self.output_ids[: stop - split]

    def accept(self, sampled: Iterable[int]) -> FinishReason | None:
        """Appends sampled tokens up to the first that ends the sequence; what follows it is dropped.

        Returns why it ends, or None. A stop id wins over the length limit.
        """
        for token in sampled:
            self.output_ids.append(token)
            if token in self.stop_ids and len(self.output_ids) > self.min_tokens:
                self.stop_token = token
                return "stop"
            if len(self.output_ids) >= self.max_tokens:
                return "length"
        return None
