"""Decode attention on Hopper: one query per sequence, split over keys, every SM with the same number of key tiles.

The work is one list of key tiles: all tiles of (sequence 0, KV head 0), then of (sequence 0, KV head 1), and so on.
It is cut into `num_blocks` pieces of equal size (they differ by one tile at most), so that ragged lengths balance by
construction. A block writes one partial result for each (sequence, head) that it touches; as the list is in order,
block c's part of unit u has slot c + u, unique and contiguous over c. `combine` then merges the slots of each unit.

The matmuls are transposed, S^T = K Q^T and O^T = V^T P^T, so that keys fill the 64 rows of `wgmma` and the GQA group is its N,
which may be as small as 8. One warpgroup issues TMA copies, the other computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper.memory import Ref, tiled
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import (
    KEY_TILE,
    CallSpec,
    first_visible_key,
    pool_rows,
    scale_rows,
)
from pallas_kernels.ragged_paged_attention.mosaic_gpu_decode_call import Call, DecodeTuning, copied_keys
from pallas_kernels.ragged_paged_attention.mosaic_gpu_decode_combine import combine
from pallas_kernels.ragged_paged_attention.mosaic_gpu_decode_consume import consume
from pallas_kernels.ragged_paged_attention.mosaic_gpu_decode_produce import produce


def shared_bytes(spec: CallSpec, tuning: DecodeTuning) -> int:
    """Shared memory of one block's buffers, barriers and reduction scratch excluded."""
    kv = 2 * KEY_TILE * spec.head_dim * jnp.dtype(spec.kv_dtype).itemsize
    group = padded_group(spec)
    queries = group * spec.head_dim * 2
    scales = 2 * KEY_TILE * 4 if spec.scales == "token" else 0
    converted = 2 * KEY_TILE * spec.head_dim * 2 if spec.quantized else 0
    return tuning.stages * (kv + queries + scales) + converted + group * KEY_TILE * 2


def padded_group(spec: CallSpec) -> int:
    """Columns of the transposed matmuls: the group, rounded up to the 8 that `wgmma` asks for."""
    return -(-spec.group // 8) * 8


def decode(
    q: Float[Array, "T H D"],
    pages: Array,
    scales: Array | None,
    layer: Int[Array, ""],
    page_table: Int[Array, "S W"],
    rows: Int[Array, " S"],
    lens: Int[Array, " S"],
    sinks: Float[Array, " H"] | None,
    *,
    spec: CallSpec,
    tuning: DecodeTuning,
) -> tuple[Float[Array, "S H D"], Int[Array, " S"]]:
    """Attention of the sequences with lens > 0, whose query is row rows[s] of q and whose keys are the first lens[s].

    Returns their outputs in float32, compacted to the front, and the row that each belongs to (T for the unused ones).
    """
    S, K, G, D = page_table.shape[0], spec.num_kv_heads, spec.group, spec.head_dim
    T = q.shape[0]
    order = jnp.argsort(lens <= 0, stable=True).astype(jnp.int32)
    work = _plan(spec, tuning, order, lens)
    rows = jnp.where(lens[order] > 0, rows[order], T)
    queries = q.at[rows].get(mode="fill", fill_value=0).reshape(S, K, G, D)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padded_group(spec) - G), (0, 0))).astype(spec.compute_dtype)
    partials = _attend(queries, pages, scales, layer, page_table, work, spec, tuning)
    out = combine(*partials, work.unit_slots, sinks, spec)
    return out[..., :G].transpose(0, 1, 3, 2).reshape(S, K * G, D), rows


@dataclass(frozen=True, slots=True)
class _Work:
    """sequences [S, 4]: index, length, first tile, tiles; compacted, unused ones have 0 tiles.

    blocks [num_blocks, 4]: the (compact sequence, head, tile) that a block starts with, and its number of tiles.
    unit_slots [S * K, 2]: first slot and number of slots of each unit's partial results.
    """

    sequences: Array
    blocks: Array
    unit_slots: Array


def _plan(spec: CallSpec, tuning: DecodeTuning, order: Int[Array, " S"], lens: Int[Array, " S"]) -> _Work:
    """Cuts the list of tiles; depends on lengths alone, so that XLA computes it once for all layers of a step."""
    S, K, C = order.shape[0], spec.num_kv_heads, tuning.num_blocks
    lens = jnp.maximum(lens[order], 0)
    first_tile = first_visible_key(spec, lens - 1) // KEY_TILE
    tiles = jnp.where(lens > 0, -(-lens // KEY_TILE) - first_tile, 0)
    starts = K * (jnp.cumsum(tiles) - tiles)
    total = K * jnp.sum(tiles)
    share, rest = total // C, total % C
    block = jnp.arange(C)
    begin = block * share + jnp.minimum(block, rest)
    sequence = jnp.clip(jnp.searchsorted(starts + K * tiles, begin, side="right"), 0, S - 1)
    within = begin - starts[sequence]
    per_head = jnp.maximum(tiles[sequence], 1)
    blocks = jnp.stack([sequence, within // per_head, within % per_head, share + (block < rest)], axis=1)

    def block_of(tile: Array) -> Array:
        longer = rest * (share + 1)
        return jnp.where(tile < longer, tile // (share + 1), rest + (tile - longer) // jnp.maximum(share, 1))

    unit_begin = (starts[:, None] + tiles[:, None] * jnp.arange(K)[None, :]).reshape(-1)
    unit_tiles = jnp.repeat(tiles, K)
    first = block_of(unit_begin)
    count = jnp.where(unit_tiles > 0, block_of(unit_begin + unit_tiles - 1) - first + 1, 0)
    unit_slots = jnp.stack([first + jnp.arange(S * K), count], axis=1)
    sequences = jnp.stack([order, lens, first_tile, tiles], axis=1)
    return _Work(*(x.astype(jnp.int32) for x in (sequences, blocks, unit_slots)))


def _attend(
    queries: Float[Array, "S K N D"],
    pages: Array,
    scales: Array | None,
    layer: Int[Array, ""],
    page_table: Int[Array, "S W"],
    work: _Work,
    spec: CallSpec,
    tuning: DecodeTuning,
) -> tuple[Float[Array, "slots D N"], Float[Array, "slots 2 N"]]:
    """Partial results of every block: weighted values, and (maximum in base 2, sum)."""
    S, K, N, D = queries.shape
    inputs = [queries, pool_rows(pages), layer.reshape(1).astype(jnp.int32), page_table, work.sequences, work.blocks]
    if scales is not None:
        inputs.append(scale_rows(scales))

    def body(*refs: Ref, **scratch: Ref) -> None:
        q_ref, pool, layer_ref, table, sequences, blocks, *rest, acc, stats = refs
        scale_ref = rest[0] if rest else None
        block = lax.axis_index("block")
        begin = tuple(blocks[block, i] for i in range(4))
        shared = (q_ref, pool, layer_ref, table, sequences, scale_ref, acc, stats, block, begin)
        call = Call(spec, tuning, pages.shape[1], N, *shared, scratch)
        pl.when(lax.axis_index("wg") == 0)(lambda: produce(call))
        pl.when(lax.axis_index("wg") == 1)(lambda: consume(call))

    slots = tuning.num_blocks + S * K
    return plgpu.kernel(  # type: ignore[no-any-return]
        body,
        out_type=(
            jax.ShapeDtypeStruct((slots, D, N), jnp.float32),
            jax.ShapeDtypeStruct((slots, 2, N), jnp.float32),
        ),
        grid=(tuning.num_blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=_scratch(spec, tuning, N),
    )(*inputs)


def _scratch(spec: CallSpec, tuning: DecodeTuning, N: int) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    D, stages, stored, compute = spec.head_dim, tuning.stages, jnp.dtype(spec.kv_dtype), spec.compute_dtype
    dynamic = spec.scales == "token"
    arrivals = 2 * (KEY_TILE // copied_keys(spec)) * (2 if dynamic else 1)
    scratch = {
        "queries": tiled((stages, N, D), compute),
        "keys": tiled((stages, KEY_TILE, D), stored),
        "values": tiled((stages, KEY_TILE, D), stored),
        "weights": tiled((N, KEY_TILE), compute),
        "queries_full": plgpu.Barrier(num_barriers=stages),
        "full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
        "consumed": plgpu.Barrier(num_barriers=stages),
    }
    if dynamic:
        scratch["scales"] = plgpu.SMEM((stages, 2, KEY_TILE), jnp.float32)
    if spec.quantized:
        scratch |= {"keys16": tiled((1, KEY_TILE, D), compute), "values16": tiled((1, KEY_TILE, D), compute)}
    return scratch
