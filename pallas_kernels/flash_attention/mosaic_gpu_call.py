"""What the warpgroups of the Hopper flash attention kernel share: static facts, references, and the rows of a thread block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.flash_attention.tuning import Tiles
from pallas_kernels.hopper.memory import Ref
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.hopper.warpgroups import CONSUMERS, ROWS
from pallas_kernels.scoring import Scoring


@dataclass(frozen=True)
class Kernel:
    """Static facts.

    pack: query heads that are rows of one block. heads: of the array of rows, `group` of which share a KV head.
    num_tiles: thread blocks of a head. num_keys: rows of the arrays of keys and values.
    """

    scoring: Scoring
    tiles: Tiles
    batches: int
    pack: int
    heads: int
    group: int
    head_dim: int
    num_tiles: int
    num_keys: int

    def token(self, row: Any) -> Any:
        return row if self.pack == 1 else lax.div(row, jnp.int32(self.pack))

    def key_tiles(self, row: Any, rows: int, q_len: Any, kv_len: Any) -> tuple[Any, Any]:
        """(first, number) of the key tiles that `rows` rows from `row` on see between them."""
        return self.scoring.blocks(self.token(row), self.token(row + rows - 1), q_len, kv_len, self.tiles.keys)


@dataclass(frozen=True)
class RowTile:
    """The rows of one thread block, all scalars of the running kernel: it owns rows [row, row + 128) of `head`.

    low, high: the key tiles [low, high) that its queries see between them.
    """

    batch: Array
    row: Array
    head: Array
    kv_head: Array
    q_len: Array
    kv_len: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Call:
    """Static facts, and references. scratch: what `mosaic_gpu` allocates."""

    kernel: Kernel
    q: Ref
    k: Ref
    v: Ref
    lens: Ref
    sinks: Ref | None
    out: Ref
    scratch: dict[str, Ref]

    @property
    def rings(self) -> tuple[Ring, Ring]:
        s, stages = self.scratch, self.kernel.tiles.stages
        key_ring, value_ring = (Ring(s[n], s[f"{n}_full"], s[f"{n}_free"], stages) for n in "kv")
        return key_ring, value_ring

    def tile(self) -> RowTile:
        """This thread block's rows. With `causal`, the last rows see the most keys: they come first."""
        kernel = self.kernel
        index, heads, batches = lax.axis_index("block"), jnp.int32(kernel.heads), jnp.int32(kernel.batches)
        head, rest = lax.rem(index, heads), lax.div(index, heads)
        batch = lax.rem(rest, batches)
        row = (kernel.num_tiles - 1 - lax.div(rest, batches)) * (CONSUMERS * ROWS)
        q_len, kv_len = self.lens[batch, 0], self.lens[batch, 1]
        low, count = kernel.key_tiles(row, CONSUMERS * ROWS, q_len, kv_len)
        kv_head = lax.div(head, jnp.int32(kernel.group))
        return RowTile(batch, row, head, kv_head, q_len, kv_len, low, low + count)
