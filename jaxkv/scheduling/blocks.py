"""The block ledger: which KV blocks are free, cached or held. It knows ids and counts, no sequences and no tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Literal

from jaxkv.scheduling.errors import LedgerError

BlockState = Literal["free", "cached", "held"]


class BlockLedger:
    """Every block is in exactly one state, and free + cached + held == total after every operation.

    free: content is garbage. cached: nobody holds it, its published content may be taken up again or evicted.
    held: one or more holders (its reference count).
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        """All of num_blocks (>= 1) start free. on_evict(block) is called when a published block loses its content."""
        if num_blocks < 1:
            raise LedgerError(f"num_blocks is {num_blocks}: a ledger needs at least 1 block")
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_blocks
        self._published = bytearray(num_blocks)
        self._num_held = 0

    @property
    def num_blocks(self) -> int:
        return len(self._refs)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: the free ones, then the cached ones."""
        return len(self._free) + len(self._cached)

    def state(self, block: int) -> BlockState:
        if self._refs[block] > 0:
            return "held"
        return "cached" if self._published[block] else "free"

    def ref_count(self, block: int) -> int:
        return self._refs[block]

    def is_published(self, block: int) -> bool:
        return bool(self._published[block])

    def cached_blocks(self) -> list[int]:
        """Cached blocks in the order in which they would be evicted."""
        return list(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Takes count blocks, each with one holder. Evicts cached blocks, least recently used first, when none is free.

        Raises LedgerError, and takes nothing, when fewer are available.
        """
        if not 0 <= count <= self.num_available:
            raise LedgerError(f"asked for {count} blocks, {self.num_available} are available ({self.describe()})")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        self._num_held += count
        return taken

    def incref(self, block: int) -> None:
        """One more holder of a held block, or the first of a cached one."""
        if self._refs[block] == 0:
            if block not in self._cached:
                raise LedgerError(f"block {block} is free: only a held or cached block can get a holder")
            del self._cached[block]
            self._num_held += 1
        self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One holder less for each block. Without a holder, a published block becomes cached and any other free.

        Blocks freed first are evicted first.
        """
        for block in blocks:
            if self._refs[block] == 0:
                raise LedgerError(f"block {block} is {self.state(block)}: nobody holds it, so it cannot be freed")
            self._refs[block] -= 1
            if self._refs[block] > 0:
                continue
            self._num_held -= 1
            if self._published[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, block: int) -> None:
        """Marks a held block's content as worth keeping: it will be cached, not free, once nobody holds it."""
        if self._refs[block] == 0:
            raise LedgerError(f"block {block} is {self.state(block)}: only a held block can be published")
        self._published[block] = 1

    def touch(self, block: int) -> None:
        """Makes a cached block the most recently used; does nothing to a held one."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def describe(self) -> str:
        return f"free {self.num_free}, cached {self.num_cached}, held {self.num_held} of {self.num_blocks}"

    def check(self) -> None:
        """Recounts every block. Raises LedgerError when the books do not balance. O(num_blocks)."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, refs in enumerate(self._refs) if refs > 0}
        if min(self._refs) < 0:
            raise LedgerError(f"a reference count is negative ({self.describe()})")
        if len(free) != len(self._free) or free & cached or free & held or cached & held:
            raise LedgerError(f"a block is in two states ({self.describe()})")
        if len(held) != self._num_held or len(free) + len(cached) + len(held) != self.num_blocks:
            raise LedgerError(f"{len(held)} blocks have holders ({self.describe()})")
        for block in free | cached:
            if bool(self._published[block]) != (block in cached):
                raise LedgerError(
                    f"block {block}: published {self.is_published(block)}, in the cache {block in cached}"
                )

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._published[block] = 0
        if self._on_evict is not None:
            self._on_evict(block)
        return block
