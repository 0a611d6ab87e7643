"""What the two warpgroups of the Hopper decode kernel share: its references, and its walk over the list of key tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.hopper.memory import Ref
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import KEY_TILE, CallSpec, first_visible_key


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """num_blocks: thread blocks of the persistent grid. stages: tiles in flight in each."""

    num_blocks: int
    stages: int


def copied_keys(spec: CallSpec) -> int:
    """Keys that one copy brings. With a window, copies at its begin and at the sequence's end that none of its keys needs are not
    made: copies of 1/30 of the window or less (but of 16 keys at least) load little more than the window."""
    most = KEY_TILE if spec.sliding_window is None else max(spec.sliding_window // 30, 16)
    return next(keys for keys in (64, 32, 16) if keys <= min(most, spec.page_size))


@dataclass(frozen=True)
class Tile:
    """The i-th key tile of a block, all scalars of the running kernel.

    seq: of the compact sequences, `sequence` is its row of the page table. key0: position of the first key. opens, closes: whether it is
    the block's first and last tile of its (sequence, head); that is the block's `unit`-th. slot, query_slot: in shared memory.
    """

    i: Array
    seq: Array
    head: Array
    sequence: Array
    kv_len: Array
    key0: Array
    opens: Array
    closes: Array
    unit: Array
    slot: Array
    query_slot: Array

    def seen(self, spec: CallSpec) -> tuple[Array | None, Array]:
        """The rows [begin, end) of the tile are those of keys that the query sees; begin is None without a window."""
        begin = None if spec.sliding_window is None else first_visible_key(spec, self.kv_len - 1) - self.key0
        return begin, self.kv_len - self.key0


@dataclass(frozen=True)
class Call:
    """Static facts, references, and where the block begins. num_pages: of the pool. columns: of the transposed matmuls.

    begin: the compact sequence, head and tile that block number `block` starts with, and its number of tiles; read before the roles part:
    read in each of them, they cost every thread 8 registers more. scratch: what `mosaic_gpu_decode` allocates.
    """

    spec: CallSpec
    tuning: DecodeTuning
    num_pages: int
    columns: int
    queries: Ref
    pool: Ref
    layer: Ref
    table: Ref
    sequences: Ref
    scales: Ref | None
    acc: Ref
    stats: Ref
    block: Array
    begin: tuple[Array, ...]
    scratch: dict[str, Ref]

    def static_scale(self, which: int, head: Array) -> Array | None:
        """The scale of keys (0) or values (1), for pools with one per layer and head."""
        if self.spec.scales != "static" or self.scales is None:
            return None
        scale: Array = self.scales[(self.layer[0] * 2 + which) * self.spec.num_kv_heads + head]
        return scale

    def for_tiles(self, visit: Callable[..., Any], *carry: Any) -> Array:
        """carry = visit(tile, *carry) for each key tile of this block, in the order of the list. Returns how many they are."""
        stages = jnp.int32(self.tuning.stages)
        *start, count = self.begin

        def step(i: Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
            seq, head, tile, unit, *carry = state
            sequence, kv_len, first_tile, tiles = (self.sequences[seq, j] for j in range(4))
            ends = tile + 1 == tiles
            item = Tile(
                i, seq, head, sequence, kv_len, (first_tile + tile) * KEY_TILE, (i == 0) | (tile == 0),
                (i == count - 1) | ends, unit, lax.rem(i, stages), lax.rem(unit, stages),
            )  # fmt: skip
            carry = visit(item, *carry)
            head = jnp.where(ends, head + 1, head)
            next_sequence = head == self.spec.num_kv_heads
            return (
                jnp.where(next_sequence, seq + 1, seq),
                jnp.where(next_sequence, 0, head),
                jnp.where(ends, 0, tile + 1),
                jnp.where(ends, unit + 1, unit),
                *carry,
            )

        lax.fori_loop(0, count, step, (*start, jnp.int32(0), *carry))
        return count
