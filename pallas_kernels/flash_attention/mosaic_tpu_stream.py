"""Streams the blocks of keys and values that one KV head's query blocks see into VMEM, one ahead of its use.

The query blocks are visited in order, and within each its key blocks; what no query of a block sees is not copied. While one
block is in use the next one is on its way, be it of the same query block or of a later one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SLOTS = 2
_ITEM, _STEP, _FETCHED, _READ = range(4)
CURSOR_SIZE = 4


@dataclasses.dataclass(frozen=True)
class Stream:
    """blocks(item): (first, number) of the key blocks of query block `item`, of `items` in all.

    k_hbm, v_hbm: [B, Tk, lanes of all heads], of which `batch` and the lanes from `lane` on are read. k_buf, v_buf: VMEM
    [SLOTS, block, lanes]. sems: DMA semaphores [SLOTS]. cursor: SMEM [CURSOR_SIZE], survives between grid steps.
    """

    blocks: Callable[[Any], tuple[Any, Any]]
    items: int
    batch: Any
    lane: Any
    k_hbm: Any
    v_hbm: Any
    k_buf: Any
    v_buf: Any
    sems: Any
    cursor: Any

    def start(self) -> None:
        """Starts the first copy: call once, before the first query block."""
        self.cursor[_ITEM] = self._next_with_blocks(jnp.int32(0))
        self.cursor[_STEP] = 0
        self.cursor[_FETCHED] = 0
        self.cursor[_READ] = 0
        self._fetch_next()

    def next_block(self, block: jax.Array) -> jax.Array:
        """Waits for the block that is due, whose number is `block`, and returns its slot.

        The slot read before it is given to the next copy: its contents must have been used up.
        """
        self._fetch_next()
        read: jax.Array = self.cursor[_READ]
        self.cursor[_READ] = read + 1
        slot = read % SLOTS
        self._for_copies(block, slot, self._wait)
        return slot

    def _fetch_next(self) -> None:
        """Starts the copies of the block at the cursor, if any is left, and moves the cursor on."""
        item = self.cursor[_ITEM]

        @pl.when(item < self.items)
        def _() -> None:
            step, fetched = self.cursor[_STEP], self.cursor[_FETCHED]
            first, count = self.blocks(item)
            self._for_copies(first + step, fetched % SLOTS, lambda copy: copy.start())
            done = step + 1 >= count
            self.cursor[_FETCHED] = fetched + 1
            self.cursor[_STEP] = jnp.where(done, 0, step + 1)

            @pl.when(done)
            def _() -> None:
                self.cursor[_ITEM] = self._next_with_blocks(item + 1)

    def _next_with_blocks(self, item: jax.Array) -> jax.Array:
        """The first query block from `item` on that sees anything; `items` if none does."""

        def sees_nothing(item: jax.Array) -> jax.Array:
            nothing: jax.Array = (item < self.items) & (self.blocks(item)[1] == 0)
            return nothing

        found: jax.Array = lax.while_loop(sees_nothing, lambda item: item + 1, item)
        return found

    def _for_copies(self, block: jax.Array, slot: jax.Array, do: Callable[[Any], None]) -> None:
        """Calls do(copy) for the copies of one block: of all its keys, or of those that exist."""
        size, lanes = self.k_buf.shape[1:]
        Tk = self.k_hbm.shape[1]
        whole, rest = divmod(Tk, size)

        def copies(keys: int) -> None:
            at = pl.ds(pl.multiple_of(block * size, size), keys)
            for hbm, buf in ((self.k_hbm, self.k_buf), (self.v_hbm, self.v_buf)):
                source = hbm.at[self.batch, at, pl.ds(self.lane, lanes)]
                do(pltpu.make_async_copy(source, buf.at[slot, pl.ds(0, keys)], self.sems.at[slot]))

        if whole:
            pl.when(block < whole)(lambda: copies(size))
        if rest:
            pl.when(block == whole)(lambda: copies(rest))

    @staticmethod
    def _wait(copy: Any) -> None:
        copy.wait()
