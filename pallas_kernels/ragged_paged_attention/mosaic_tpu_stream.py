"""Streams the KV blocks of a list of work items from the page pool into VMEM, several blocks ahead of their use.

A work item is a stretch of consecutive pages of one sequence that some queries attend to: a decode, or a tile of a prefill
chunk. The items are visited in order; while one block is in use, the copies of the next ones (of the same item or of the
next) are under way.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.packed_rows_tpu import row_bits
from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import Numbers
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import SUBLANES, Plan
from pallas_kernels.ragged_paged_attention.mosaic_tpu_scales import TokenScales, scratch_shapes, streamed_scales

FETCH_ITEM, FETCH_PAGE, FETCH_SLOT, READ_SLOT = range(4)
CURSOR_SIZE = 4


class Tables(NamedTuple):
    """What is streamed: arrays, and in a kernel references to them in scalar memory. page_table: flat.

    seq_of, first_page, end_page: of each item. Items from num_items on are not there.
    """

    seq_of: Int[Array, " N"]
    first_page: Int[Array, " N"]
    end_page: Int[Array, " N"]
    num_items: Int[Array, " one"]
    kv_lens: Int[Array, " S"]
    page_table: Int[Array, " S*W"]
    layer: Int[Array, " one"]


class Pool(NamedTuple):
    """Where it is streamed from: arrays in HBM, and in a kernel references to them. token_scales: of a pool that has them."""

    pages: Float[Array, "L P page lanes"]
    token_scales: Float[Array, "L P rows 128"] | None

    @property
    def specs(self) -> Any:
        """As operands of a kernel."""
        return jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), self)


class Buffers(NamedTuple):
    """Scratch of a stream. kv: VMEM [slots, block, lanes]. sems: [slots]. cursor: SMEM, survives between grid steps.

    scales: of `mosaic_tpu_scales`, empty without scales per token.
    """

    kv: Any
    sems: Any
    cursor: Any
    scales: list[Any]


def buffers(plan: Plan, numbers: Numbers, pool: Pool) -> Buffers:
    return Buffers(
        pltpu.VMEM((plan.slots, plan.block_tokens, plan.page_lanes), pool.pages.dtype),
        pltpu.SemaphoreType.DMA((plan.slots,)),
        pltpu.SMEM((CURSOR_SIZE,), jnp.int32),
        [] if pool.token_scales is None else scratch_shapes(plan, numbers),
    )


def compiler_params(plan: Plan) -> pltpu.CompilerParams:
    """Of a kernel that streams: its grid steps share the stream, in order."""
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",), vmem_limit_bytes=plan.vmem_limit, disable_bounds_checks=True
    )


def stream_of(plan: Plan, numbers: Numbers, tables: Tables, pool: Pool, held: Buffers) -> KVStream:
    """In a kernel. Starts the first copies in the first grid step."""
    scales = None if pool.token_scales is None else streamed_scales(plan, numbers, pool.token_scales, *held.scales)
    stream = KVStream(plan, tables, pool.pages, scales, held.kv, held.sems, held.cursor)
    pl.when(pl.program_id(0) == 0)(stream.start)
    return stream


@dataclasses.dataclass(frozen=True)
class KVStream:
    """References of a kernel, and how it reads KV blocks."""

    plan: Plan
    tables: Tables
    pages: Any
    scales: TokenScales | None
    kv_buf: Any
    sems: Any
    cursor: Any

    def start(self) -> None:
        """Starts the first copies: call once, before the first item."""
        self.cursor[FETCH_ITEM] = 0
        self.cursor[FETCH_PAGE] = self.tables.first_page[0]
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
        item, tables = self.cursor[FETCH_ITEM], self.tables

        @pl.when(item < tables.num_items[0])
        def _() -> None:
            page, slot = self.cursor[FETCH_PAGE], self.cursor[FETCH_SLOT]
            count = jnp.minimum(self.plan.block_pages, tables.end_page[item] - page)
            row = tables.seq_of[item] * (tables.page_table.shape[0] // tables.kv_lens.shape[0]) + page
            full = count == self.plan.block_pages

            @pl.when(full)
            def _() -> None:
                for j in range(self.plan.block_pages):
                    for copy in self._copies(tables.page_table[row + j], j, slot):
                        copy.start()

            @pl.when(jnp.logical_not(full))
            def _() -> None:
                def fetch_page(j: jax.Array, _: None) -> None:
                    for copy in self._copies(tables.page_table[row + j], j, slot):
                        copy.start()

                lax.fori_loop(0, count, fetch_page, None)

            done = page + self.plan.block_pages >= tables.end_page[item]
            following = jnp.minimum(item + 1, tables.first_page.shape[0] - 1)
            self.cursor[FETCH_ITEM] = jnp.where(done, item + 1, item)
            self.cursor[FETCH_PAGE] = jnp.where(done, tables.first_page[following], page + self.plan.block_pages)
            self.cursor[FETCH_SLOT] = _following(slot, self.plan.slots)

    def _copies(self, page_id: Any, j: Any, slot: jax.Array) -> list[Any]:
        """The copies that bring page `page_id` to place `j` of a slot."""
        size = self.plan.page_size
        at = j * size if isinstance(j, int) else pl.multiple_of(j * size, size)
        layer = self.tables.layer[0]
        sem = self.sems.at[slot]
        copies = [pltpu.make_async_copy(self.pages.at[layer, page_id], self.kv_buf.at[slot, pl.ds(at, size)], sem)]
        if self.scales is not None:
            copies += self.scales.copies(layer, page_id, j, slot, sem)
        return copies

    def _wait(self, ref: Any, slot: jax.Array) -> None:
        pltpu.make_async_copy(ref, ref, self.sems.at[slot]).wait()


def _following(slot: jax.Array, slots: int) -> jax.Array:
    return jnp.where(slot + 1 == slots, 0, slot + 1)
