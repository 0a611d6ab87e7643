"""How the Hopper prefill kernel cuts its work: rows of a warpgroup, tiles of queries, their order, and the memory
they take."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.hopper.warpgroups import CONSUMERS, ROWS
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import CallSpec, first_visible_key


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """num_blocks: blocks of the persistent grid, one for each SM. keys: keys of a tile. stages: tiles of K and of V in flight.

    converted: 16-bit tiles of K and of V that 8-bit pages are converted into. registers: of a thread of the consumers and of the
    producer, multiples of 8 with 2 * consumers + producer <= 504.
    """

    num_blocks: int
    keys: int
    stages: int
    converted: int = 0
    registers: tuple[int, int] = (216, 72)


@dataclass(frozen=True, slots=True)
class Shape:
    """How query heads map to rows. heads: query heads in one tile; splits: tiles that share a KV head; span: tokens in
    a tile."""

    heads: int
    splits: int
    span: int

    @staticmethod
    def of(spec: CallSpec) -> Shape:
        """The largest power of two that divides the group, at most 8: TMA fills shared memory in blocks of 8 rows."""
        heads = next(h for h in (8, 4, 2, 1) if spec.group % h == 0)
        return Shape(heads, spec.group // heads, ROWS // heads)


def staged_columns(spec: CallSpec) -> int:
    """Columns of the output that one warpgroup stages in shared memory at a time."""
    return 64 if spec.head_dim == 256 else spec.head_dim


def shared_bytes(spec: CallSpec, tuning: PrefillTuning) -> int:
    """Shared memory of one block's buffers, barriers and reduction scratch excluded."""
    D = spec.head_dim
    stored = (
        2 * tuning.stages * tuning.keys * (D * jnp.dtype(spec.kv_dtype).itemsize + (4 if spec.scales == "token" else 0))
    )
    return stored + 2 * tuning.converted * tuning.keys * D * 2 + CONSUMERS * ROWS * (D + staged_columns(spec)) * 2


def plan(
    spec: CallSpec,
    tuning: PrefillTuning,
    T: int,
    cu_q_lens: Int[Array, " S+1"],
    q_lens: Int[Array, " S"],
    kv_lens: Int[Array, " S"],
) -> tuple[Int[Array, "tiles 5"], Int[Array, ""]]:
    """Cuts the queries of the sequences with q_lens > 0 into tiles, the most expensive first, and counts them.

    A tile is (sequence, row of its first token, that token's position, tokens, kv_len).
    """
    S, step = q_lens.shape[0], CONSUMERS * Shape.of(spec).span
    most = -(-T // step) + min(S, T)
    tiles_of = -(-q_lens // step)
    until = jnp.cumsum(tiles_of)
    index = jnp.arange(most)
    s = jnp.clip(jnp.searchsorted(until, index, side="right"), 0, S - 1)
    offset = (index - (until[s] - tiles_of[s])) * step
    position = kv_lens[s] - q_lens[s] + offset
    tokens = jnp.clip(q_lens[s] - offset, 0, step)
    used = index < until[-1]
    last = position + tokens - 1
    cost = last // tuning.keys - first_visible_key(spec, position) // tuning.keys + 1
    order = jnp.argsort(jnp.where(used, -cost, 1), stable=True)
    tiles = jnp.stack([s, cu_q_lens[s] + offset, position, tokens, kv_lens[s]], axis=1)[order]
    return tiles.astype(jnp.int32), until[-1].astype(jnp.int32)


def tile_steps(spec: CallSpec, keys: int, position: int, tokens: int) -> int:
    """Key tiles that one warpgroup multiplies for `tokens` queries from `position` on: the kernel's rule, for tests
    and `inspect`."""
    if tokens <= 0:
        return 0
    first = 0 if spec.sliding_window is None else max(position - spec.sliding_window + 1, 0)
    return (position + tokens - 1) // keys + 1 - first // keys
