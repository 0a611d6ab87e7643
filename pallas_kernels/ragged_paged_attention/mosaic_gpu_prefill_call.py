"""What the warpgroups of the Hopper prefill kernel share: its references, its work items, and where its tiles lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.hopper.memory import Ref
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import CallSpec, first_visible_key
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_plan import PrefillTuning, Shape


@dataclass(frozen=True)
class Item:
    """One work item, all scalars of the running kernel. `tiles` = [low, high) are the key tiles that its queries see
    together."""

    sequence: Array
    row: Array
    position: Array
    tokens: Array
    kv_len: Array
    kv_head: Array
    head: Array
    low: Array
    high: Array

    def opaque(self, value: Any) -> Any:
        """The value, which the compiler cannot know to be the same for all items.

        What it knows, such as addresses, it computes when the kernel starts, and keeps in registers that the loops need.
        """
        return value + jnp.where(self.kv_len > 0, 0, 1)


@dataclass(frozen=True)
class Call:
    """Static facts, and references. num_pages: of the pool. num_rows: T. scratch: what `mosaic_gpu_prefill` allocates."""

    spec: CallSpec
    tuning: PrefillTuning
    num_pages: int
    num_rows: int
    q: Ref
    pool: Ref
    layer: Ref
    table: Ref
    tiles: Ref
    counts: Ref
    columns: Ref
    scales: Ref | None
    sinks: Ref | None
    out: Ref
    scratch: dict[str, Ref]

    @property
    def shape(self) -> Shape:
        return Shape.of(self.spec)

    def stored(self) -> tuple[Ring, Ring]:
        """The rings of keys and of values as they come from the pool."""
        slots, s = self.tuning.stages, self.scratch
        keys, values = (Ring(s[f"{n}_stored"], s["full"], s.get("free"), slots, i * slots) for i, n in enumerate("kv"))
        return keys, values

    def converted(self) -> tuple[Ring, Ring]:
        """The rings of 16-bit keys and values, for 8-bit pools."""
        slots, s = self.tuning.converted, self.scratch
        keys, values = (Ring(s[f"{n}_converted"], s["ready"], s["done"], slots, i * slots) for i, n in enumerate("kv"))
        return keys, values

    def for_items(self, visit: Callable[[Array, Array, Item, Any], Any], carry: Any = None) -> Array:
        """carry = visit(index, tiles before it, item, carry) for each item of this block. Returns how many tiles they have."""

        def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
            i, before, _, carry = state
            item = self.item(i)
            carry = visit(i, before, item, carry)
            item = self.item(i)  # read again: it would sit in registers during the visit
            # Whether there are more is read from memory each time: a bound would sit in a register meanwhile.
            return i + 1, before + item.high - item.low, self.is_item(i + 1), carry

        start = (jnp.int32(0), jnp.int32(0), self.is_item(jnp.int32(0)), carry)
        total: Array = lax.while_loop(lambda state: state[2], step, start)[1]
        return total

    def is_item(self, i: Array) -> Array:
        """Whether the block has an i-th item."""
        return self._work(i) < self.counts[0] * (self.spec.num_kv_heads * self.shape.splits)

    def _work(self, i: Array) -> Array:
        """The block's i-th place in the list of items: to and fro, so that early blocks do not get all of the longest."""
        block, blocks = lax.axis_index("block"), jnp.int32(self.tuning.num_blocks)
        return i * blocks + jnp.where(lax.rem(i, jnp.int32(2)) == 0, block, blocks - 1 - block)

    def item(self, i: Array) -> Item:
        """The block's i-th item, read from global memory."""
        tile_heads = jnp.int32(self.spec.num_kv_heads * self.shape.splits)
        work = self._work(i)
        tile, tile_head = lax.div(work, tile_heads), lax.rem(work, tile_heads)
        sequence, row, position, tokens, kv_len = (self.tiles[tile, j] for j in range(5))
        low = lax.div(first_visible_key(self.spec, position), jnp.int32(self.tuning.keys))
        high = lax.div(position + tokens - 1, jnp.int32(self.tuning.keys)) + 1
        kv_head = lax.div(tile_head, jnp.int32(self.shape.splits))
        return Item(sequence, row, position, tokens, kv_len, kv_head, tile_head * self.shape.heads, low, high)

    def rows_of(self, item: Item, wg: Any) -> tuple[Array, Array, Array, Array]:
        """(first row, position of its token, first valid token, valid tokens) of one warpgroup's rows.

        The rows are moved back where they would pass the end of q; tokens before the first valid one are then not its
        own.
        """
        span = self.shape.span
        wanted = item.row + wg * span
        row = jnp.minimum(wanted, self.num_rows - span)
        tokens = jnp.clip(item.tokens - wg * span, 0, span)
        return row, item.position + row - item.row, wanted - row, tokens
