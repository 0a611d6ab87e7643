"""Streams the KV blocks of a list of work items from the page pool into VMEM, several blocks ahead of their use.

A work item is a stretch of consecutive pages of one sequence that some queries attend to: a decode, or a tile of a prefill
chunk. The items are visited in order; while one block is in use, the copies of the next ones (of the same item or of the
next) are under way.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.packed_rows_tpu import row_bits
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import SUBLANES, Plan
from pallas_kernels.ragged_paged_attention.mosaic_tpu_scales import TokenScales

FETCH_ITEM, FETCH_PAGE, FETCH_SLOT, READ_SLOT = range(4)
CURSOR_SIZE = 4


@dataclasses.dataclass(frozen=True)
class KVStream:
    """References of a kernel, and how it reads KV blocks.

    seq_of, first_page, end_page: SMEM, one entry per item. page_table: SMEM [S * W], flat.
    pages: HBM [L, P, page, lanes]. kv_buf: VMEM [slots, block, lanes]. sems: DMA semaphores [slots].
    scales: those per token and head, or None.
    cursor: SMEM [4], survives between grid steps.
    """

    plan: Plan
    pages_per_seq: int
    layer: Any
    num_items: Any
    seq_of: Any
    first_page: Any
    end_page: Any
    page_table: Any
    pages: Any
    kv_buf: Any
    scales: TokenScales | None
    sems: Any
    cursor: Any

    def start(self) -> None:
        """Starts the first copies: call once, before the first item."""
        self.cursor[FETCH_ITEM] = 0
        self.cursor[FETCH_PAGE] = self.first_page[0]
        self.cursor[FETCH_SLOT] = 0
        self.cursor[READ_SLOT] = 0
        for _ in range(self.plan.slots - 1):
            self._fetch_next()

    def next_block(self, count: jax.Array) -> jax.Array:
        """Waits for the block that is due, which has `count` pages, and returns its slot.

        The slot read before it is given to the next copy: its contents must have been used up.
        """
        self._fetch_next()
        slot: jax.Array = self.cursor[READ_SLOT]
        self.cursor[READ_SLOT] = _following(slot, self.plan.slots)
        full = count == self.plan.block_pages

        @pl.when(full)
        def _() -> None:
            self._wait(self.kv_buf.at[slot], slot)
            if self.scales is not None:
                self._wait(self.scales.buffer.at[slot], slot)

        @pl.when(jnp.logical_not(full))
        def _() -> None:
            def wait_page(j: jax.Array, _: None) -> None:
                for copy in self._copies(0, j, slot):
                    copy.wait()

            lax.fori_loop(0, count, wait_page, None)

        return slot

    def clean_tail(self, slot: jax.Array, valid: jax.Array, stop: Any) -> None:
        """Zeroes the rows [valid, stop) of a block: they may hold NaN, and a probability of 0 would not hide it.

        stop: a multiple of the rows of a register (32 at most).
        """
        dtype, lanes = self.kv_buf.dtype, self.kv_buf.shape[-1]
        packing = 4 // dtype.itemsize
        tile = SUBLANES * packing

        def clean(index: jax.Array, _: None) -> None:
            at = (slot, pl.ds(pl.multiple_of(index * tile, tile), tile))
            keep = row_bits((SUBLANES, lanes), packing, 0, valid - index * tile)
            words = pltpu.bitcast(self.kv_buf[at], jnp.int32)
            self.kv_buf[at] = pltpu.bitcast(words & keep, dtype)

        lax.fori_loop(valid // tile, stop // tile, clean, None)

    def _fetch_next(self) -> None:
        """Starts the copies of the block at the fetch cursor, if any is left, and moves the cursor on."""
        item = self.cursor[FETCH_ITEM]

        @pl.when(item < self.num_items[0])
        def _() -> None:
            page, slot = self.cursor[FETCH_PAGE], self.cursor[FETCH_SLOT]
            count = jnp.minimum(self.plan.block_pages, self.end_page[item] - page)
            row = self.seq_of[item] * self.pages_per_seq + page
            full = count == self.plan.block_pages

            @pl.when(full)
            def _() -> None:
                for j in range(self.plan.block_pages):
                    for copy in self._copies(self.page_table[row + j], j, slot):
                        copy.start()

            @pl.when(jnp.logical_not(full))
            def _() -> None:
                def fetch_page(j: jax.Array, _: None) -> None:
                    for copy in self._copies(self.page_table[row + j], j, slot):
                        copy.start()

                lax.fori_loop(0, count, fetch_page, None)

            done = page + self.plan.block_pages >= self.end_page[item]
            following = jnp.minimum(item + 1, self.first_page.shape[0] - 1)
            self.cursor[FETCH_ITEM] = jnp.where(done, item + 1, item)
            self.cursor[FETCH_PAGE] = jnp.where(done, self.first_page[following], page + self.plan.block_pages)
            self.cursor[FETCH_SLOT] = _following(slot, self.plan.slots)

    def _copies(self, page_id: Any, j: Any, slot: jax.Array) -> list[Any]:
        """The copies that bring page `page_id` to place `j` of a slot."""
        size = self.plan.page_size
        at = j * size if isinstance(j, int) else pl.multiple_of(j * size, size)
        layer = self.layer[0]
        sem = self.sems.at[slot]
        copies = [pltpu.make_async_copy(self.pages.at[layer, page_id], self.kv_buf.at[slot, pl.ds(at, size)], sem)]
        if self.scales is not None:
            copies += self.scales.copies(layer, page_id, j, slot, sem)
        return copies

    def _wait(self, ref: Any, slot: jax.Array) -> None:
        pltpu.make_async_copy(ref, ref, self.sems.at[slot]).wait()


def _following(slot: jax.Array, slots: int) -> jax.Array:
    return jnp.where(slot + 1 == slots, 0, slot + 1)
