"""Which blocks a sequence holds: found in the prefix cache, taken on demand, published when full, released at once."""

from __future__ import annotations

from jaxkv.scheduling.blocks import BlockLedger
from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.scheduling.errors import LedgerError
from jaxkv.scheduling.prefix import PrefixIndex, block_digest, root_digest
from jaxkv.scheduling.sequence import Sequence


class SequenceBlocks:
    """Keeps ledger, prefix index and the block lists of sequences in step with each other.

    A block that was found in the cache is never written by the finder: it is full, and writes start behind it. The block in which
    a prompt ends is copied for a sibling: each writes its own.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._index = PrefixIndex()
        self.ledger = BlockLedger(config.num_blocks, on_evict=self._index.forget)

    def start_chain(self, seq: Sequence, weight_version: int) -> None:
        """Names the prefix chain that the sequence belongs to."""
        seq.root_digest = root_digest(cache_salt=seq.cache_salt, weight_version=weight_version)

    def match(self, seq: Sequence) -> list[int]:
        """Blocks of the cache that hold the longest prefix of the known tokens, in order. Nothing is taken yet."""
        if not self._config.enable_prefix_caching or seq.needs_prompt_logprobs:
            return []
        hits: list[int] = []
        for index in range(seq.num_tokens // self._config.block_size):
            block = self._index.find(self._digest(seq, index), self._parent(seq, index), self._tokens(seq, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def attach(self, seq: Sequence, hits: list[int]) -> None:
        """Gives a sequence without blocks what `match` found. Its last known token is still to be computed."""
        for block in hits:
            self.ledger.incref(block)
        seq.block_ids = list(hits)
        seq.num_published = len(hits)
        seq.num_shared_tokens = len(hits) * self._config.block_size
        seq.num_computed = min(seq.num_shared_tokens, seq.num_tokens - 1)

    def has_sharable_prompt(self, seq: Sequence) -> bool:
        """Whether its siblings can have all of the prompt from it, but for the last token, which each computes for itself."""
        if not self._config.enable_prefix_caching:
            return True
        in_last_block = len(seq.prompt_ids) % self._config.block_size
        return max(seq.num_computed, seq.num_shared_tokens) >= len(seq.prompt_ids) - min(in_last_block, 1)

    def block_to_copy(self, seq: Sequence, hits: list[int], sibling: Sequence | None) -> int | None:
        """The block in which the prompt ends, of a sibling with `has_sharable_prompt`, where `hits` lack just that.

        Both will write behind the prompt, so the block cannot be shared. None where there is nothing to copy.
        """
        index, in_last_block = divmod(len(seq.prompt_ids), self._config.block_size)
        if sibling is None or in_last_block < 2 or len(hits) != index or sibling.prompt_ids != seq.prompt_ids:
            return None
        if seq.needs_prompt_logprobs or not self._config.enable_prefix_caching:
            return None
        return sibling.block_ids[index]

    def attach_copy(self, seq: Sequence) -> int:
        """Takes the block that becomes a copy, behind what `attach` gave. Returns it; the caller has it copied."""
        [block] = self.ledger.allocate(1)
        seq.block_ids.append(block)
        seq.num_computed = len(seq.prompt_ids) - 1
        return block

    def grow(self, seq: Sequence, num_tokens: int) -> int:
        """Takes blocks for the next num_tokens tokens, as far as there are any. Returns for how many tokens it has."""
        missing = self._config.blocks_for(seq.num_computed + num_tokens) - len(seq.block_ids)
        if missing > 0:
            seq.block_ids += self.ledger.allocate(min(missing, self.ledger.num_available))
        return min(num_tokens, len(seq.block_ids) * self._config.block_size - seq.num_computed)

    def still_needs(self, seq: Sequence) -> int:
        """Blocks that a sequence has yet to take for its known tokens and the one after them."""
        return self._near_need(seq) - len(seq.block_ids)

    def cost_of(self, seq: Sequence, hits: list[int]) -> int:
        """Available blocks that a waiting sequence with these hits takes: for its known tokens and one more."""
        from_cache = sum(self.ledger.ref_count(block) == 0 for block in hits)
        return self._near_need(seq) - len(hits) + from_cache

    def publish(self, seq: Sequence) -> None:
        """Offers blocks that have become full and computed. A duplicate of a published block stays its holder's own."""
        if not self._config.enable_prefix_caching:
            return
        while (seq.num_published + 1) * self._config.block_size <= seq.num_computed:
            self._offer(seq, seq.num_published)
            seq.num_published += 1

    def release(self, seq: Sequence) -> None:
        """Gives all its blocks back, later ones first, so that a chain is evicted from its end.

        Where another block stands in the index for one of this chain, that block is refreshed instead; where none does
        any more, this one takes the place. So every cached block stays reachable and outlives what follows it.
        """
        for index in range(len(seq.block_ids) - 1, -1, -1):
            if index < seq.num_published:
                self._offer(seq, index)
            self.ledger.free((seq.block_ids[index],))
            if index < seq.num_published:
                self._refresh(seq, index)
        seq.block_ids = []  # a plan that is still running keeps the old list
        seq.num_published = 0
        seq.num_shared_tokens = 0
        seq.num_computed = 0

    def forget_cached(self) -> None:
        """Empties the prefix cache: every cached block is evicted."""
        self.ledger.free(self.ledger.allocate(self.ledger.num_available))

    def check(self, running: list[Sequence]) -> None:
        """Raises LedgerError unless exactly the running sequences hold blocks and index and ledger agree."""
        self.ledger.check()
        counts: dict[int, int] = {}
        for seq in running:
            for block in seq.block_ids:
                counts[block] = counts.get(block, 0) + 1
        for block in range(self.ledger.num_blocks):
            if self.ledger.ref_count(block) != counts.get(block, 0):
                raise LedgerError(
                    f"block {block} has {self.ledger.ref_count(block)} holders, {counts.get(block, 0)} known"
                )
        published = self._index.parents().keys()
        if published != {block for block in range(self.ledger.num_blocks) if self.ledger.is_published(block)}:
            raise LedgerError(f"the prefix index names {len(published)} blocks, the ledger others")

    def _near_need(self, seq: Sequence) -> int:
        return self._config.blocks_for(min(seq.num_tokens + 1, seq.peak_tokens))

    def _tokens(self, seq: Sequence, index: int) -> list[int]:
        size = self._config.block_size
        return seq.tokens(index * size, (index + 1) * size)

    def _parent(self, seq: Sequence, index: int) -> bytes:
        return self._digest(seq, index - 1) if index else seq.root_digest

    def _digest(self, seq: Sequence, index: int) -> bytes:
        """Digest of a full block of known tokens; each is hashed once in a sequence's life."""
        while len(seq.digests) <= index:
            parent = seq.digests[-1] if seq.digests else seq.root_digest
            seq.digests.append(block_digest(parent, self._tokens(seq, len(seq.digests))))
        return seq.digests[index]

    def _offer(self, seq: Sequence, index: int) -> None:
        block, digest = seq.block_ids[index], self._digest(seq, index)
        if self._index.block_of(digest) is None:
            self._index.publish(block, digest, self._parent(seq, index), self._tokens(seq, index))
            self.ledger.publish(block)

    def _refresh(self, seq: Sequence, index: int) -> None:
        published = self._index.block_of(self._digest(seq, index))
        if published is not None:
            self.ledger.touch(published)
