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

from pallas_kernels.mosaic_gpu_store import store
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import (
    KEY_TILE,
    NO_LOGIT,
    CallSpec,
    Ref,
    choose,
    copy_tile,
    first_visible_key,
    pool_rows,
    scale_rows,
    scaled_dots,
    tiled,
)
from pallas_kernels.ragged_paged_attention.mosaic_gpu_decode_combine import combine

WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """num_blocks: thread blocks of the persistent grid. stages: tiles in flight in each."""

    num_blocks: int
    stages: int


def shared_bytes(spec: CallSpec, tuning: DecodeTuning) -> int:
    """Shared memory of one block's buffers, barriers and reduction scratch excluded."""
    kv = 2 * KEY_TILE * spec.head_dim * jnp.dtype(spec.kv_dtype).itemsize
    group = padded_group(spec)
    queries = group * spec.head_dim * 2
    scales = 2 * KEY_TILE * 4 if spec.scales == "token" else 0
    converted = 2 * KEY_TILE * spec.head_dim * 2 if spec.quantized else 0
    return tuning.stages * (kv + queries + scales) + converted + group * KEY_TILE * 2


def copied_keys(spec: CallSpec) -> int:
    """Keys that one copy brings. With a window, copies at its begin and at the sequence's end that none of its keys needs are not
    made: copies of 1/30 of the window or less (but of 16 keys at least) load little more than the window."""
    most = KEY_TILE if spec.sliding_window is None else max(spec.sliding_window // 30, 16)
    return next(keys for keys in (64, 32, 16) if keys <= min(most, spec.page_size))


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
    P = pages.shape[1]
    stages = tuning.stages
    inputs = [queries, pool_rows(pages), layer.reshape(1).astype(jnp.int32), page_table, work.sequences, work.blocks]
    if scales is not None:
        inputs.append(scale_rows(scales))
    dynamic, windowed = spec.scales == "token", spec.sliding_window is not None
    compute = spec.compute_dtype

    def body(*refs: Ref) -> None:
        q_ref, pool, layer_ref, table, sequences, blocks, *rest = refs
        scale_ref = rest.pop(0) if scales is not None else None
        acc_ref, stat_ref, q_smem, k_smem, v_smem, p_smem, scale_smem, k16, v16, q_full, full, consumed = rest
        c = lax.axis_index("block")
        seq0, head0, tile0, count = (blocks[c, i] for i in range(4))

        def step_on(seq: Array, head: Array, tile: Array, tiles: Array) -> tuple[Array, Array, Array]:
            """The item after (seq, head, tile) in the list."""
            unit_done = tile + 1 == tiles
            head = jnp.where(unit_done, head + 1, head)
            sequence_done = head == K
            return (
                jnp.where(sequence_done, seq + 1, seq),
                jnp.where(sequence_done, 0, head),
                jnp.where(unit_done, 0, tile + 1),
            )

        @pl.when(lax.axis_index("wg") == 0)
        def _copy() -> None:
            layer_row = layer_ref[0] * P

            def visit(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                seq, head, tile, unit = carry
                slot = lax.rem(i, jnp.int32(stages))
                sid, kv_len, first_tile, tiles = (sequences[seq, j] for j in range(4))
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(consumed.at[slot]))

                @pl.when((i == 0) | (tile == 0))
                def _queries() -> None:
                    q_slot = lax.rem(unit, jnp.int32(stages))
                    plgpu.copy_gmem_to_smem(q_ref.at[seq, head], q_smem.at[q_slot], q_full.at[q_slot])

                for which, smem in enumerate((k_smem, v_smem)):
                    copy_tile(
                        spec,
                        pool=pool,
                        scales=scale_ref if dynamic else None,
                        first_row=lambda page, which=which: ((layer_row + page) * 2 + which) * K + head,
                        page_ids=table.at[sid],
                        key0=(first_tile + tile) * KEY_TILE,
                        kv_len=kv_len,
                        rows=copied_keys(spec),
                        first_key=first_visible_key(spec, kv_len - 1) if windowed else None,
                        tile=smem.at[slot],
                        tile_scales=scale_smem.at[slot, which] if dynamic else None,
                        barrier=full.at[slot],
                    )
                unit = jnp.where(tile + 1 == tiles, unit + 1, unit)
                return *step_on(seq, head, tile, tiles), unit

            lax.fori_loop(0, count, visit, (seq0, head0, tile0, jnp.int32(0)))
            # Every completed phase of a barrier is observed before the block ends.
            drained = jnp.minimum(count, stages)
            pl.loop(count - drained, count)(lambda i: plgpu.barrier_wait(consumed.at[lax.rem(i, jnp.int32(stages))]))

        @pl.when(lax.axis_index("wg") == 1)
        def _compute() -> None:
            def visit(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                seq, head, tile, unit, acc, top, total = carry
                slot, q_slot = lax.rem(i, jnp.int32(stages)), lax.rem(unit, jnp.int32(stages))
                _, kv_len, first_tile, tiles = (sequences[seq, j] for j in range(4))
                key0 = (first_tile + tile) * KEY_TILE
                opens = (i == 0) | (tile == 0)
                closes = (i == count - 1) | (tile + 1 == tiles)
                pl.when(opens)(lambda: plgpu.barrier_wait(q_full.at[q_slot]))
                plgpu.barrier_wait(full.at[slot])

                keys, values = k_smem.at[slot], v_smem.at[slot]
                end = kv_len - key0
                begin = first_visible_key(spec, kv_len - 1) - key0 if windowed else None
                if spec.quantized:
                    # Always 0, but not to the compiler: with a constant address it would keep the descriptors of all `wgmma`
                    # operands in registers throughout (60 of them at head_dim 256).
                    zero = jnp.where(kv_len > key0, 0, 1)
                    _convert(keys, k16.at[zero], begin, end)
                    _convert(values, v16.at[zero], begin, end)
                    plgpu.commit_smem()
                    keys, values = k16.at[zero], v16.at[zero]
                else:
                    _zero_unseen(values, begin, end)

                def key_dots(out: Ref) -> Array:
                    plgpu.wgmma(out, keys, q_smem.at[q_slot].transpose((1, 0)))
                    return out[...]

                dots = pl.run_scoped(key_dots, plgpu.WGMMAAccumulatorRef((KEY_TILE, N), jnp.float32))
                key_scale = None
                if dynamic:
                    key_scale = lax.broadcast_in_dim(_load_scales(scale_smem.at[slot, 0]), dots.shape, [0])
                elif spec.scales == "static":
                    key_scale = scale_ref[(layer_ref[0] * 2) * K + head]
                scores, factor = scaled_dots(spec, dots, key_scale)
                key_at = key0 + plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=WGMMA)
                seen = key_at < kv_len
                if spec.sliding_window is not None:
                    seen &= key_at >= kv_len - spec.sliding_window
                scores = jnp.where(seen, scores, -jnp.inf)

                before = choose(opens, jnp.full_like(top, NO_LOGIT), top)
                top = jnp.maximum(before, scores.max(axis=0) * factor)
                weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(top, scores.shape, [1]))
                shrink = jnp.exp2(before - top)
                # Summed over keys once, when the unit closes: a thread keeps its own part until then.
                total = (
                    choose(opens, jnp.zeros_like(total), total) * lax.broadcast_in_dim(shrink, scores.shape, [1])
                    + weights
                )
                if dynamic:
                    value_scale = _load_scales(scale_smem.at[slot, 1]) * spec.value_gain
                    weights = jnp.where(seen, weights * lax.broadcast_in_dim(value_scale, scores.shape, [0]), 0.0)
                weights = plgpu.layout_cast(weights.astype(compute), plgpu.Layout.WGMMA_TRANSPOSED)
                p_smem.transpose((1, 0))[...] = weights
                plgpu.commit_smem()

                def weighted_values(out: Ref) -> Array:
                    plgpu.wgmma(out, values.transpose((1, 0)), p_smem.transpose((1, 0)))
                    return out[...]

                gained = pl.run_scoped(weighted_values, plgpu.WGMMAAccumulatorRef((D, N), jnp.float32))
                plgpu.barrier_arrive(consumed.at[slot])
                acc = choose(opens, jnp.zeros_like(acc), acc) * lax.broadcast_in_dim(shrink, acc.shape, [1]) + gained

                @pl.when(closes)
                def _write() -> None:
                    at = c + seq * K + head
                    result = acc
                    if spec.scales == "static":
                        result = acc * scale_ref[(layer_ref[0] * 2 + 1) * K + head]
                    elif spec.value_gain != 1.0:
                        result = acc * (1.0 / spec.value_gain)
                    store(acc_ref.at[at], result)
                    store(stat_ref.at[at, 0], top)
                    store(stat_ref.at[at, 1], total.sum(axis=0))

                unit = jnp.where(tile + 1 == tiles, unit + 1, unit)
                return *step_on(seq, head, tile, tiles), unit, acc, top, total

            start = (
                plgpu.layout_cast(jnp.zeros((D, N), jnp.float32), WGMMA),
                plgpu.layout_cast(jnp.full((N,), NO_LOGIT, jnp.float32), WGMMA.reduce(0)),
                plgpu.layout_cast(jnp.zeros((KEY_TILE, N), jnp.float32), WGMMA),
            )
            lax.fori_loop(0, count, visit, (seq0, head0, tile0, jnp.int32(0), *start))

    slots = tuning.num_blocks + S * K
    arrivals = 2 * (KEY_TILE // copied_keys(spec)) * (2 if dynamic else 1)
    converted = (tiled((1, KEY_TILE, D), compute),) * 2 if spec.quantized else (None, None)
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
        scratch_types=(
            tiled((stages, N, D), compute),
            tiled((stages, KEY_TILE, D), pages.dtype),
            tiled((stages, KEY_TILE, D), pages.dtype),
            tiled((N, KEY_TILE), compute),
            plgpu.SMEM((stages, 2, KEY_TILE), jnp.float32) if dynamic else None,
            *converted,
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
        ),
    )(*inputs)


def _is_seen(shape: tuple[int, ...], begin: Array | None, end: Array, layout: Any) -> Array:
    """Which rows of a tile are in [begin, end)."""
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    return row < end if begin is None else (row >= begin) & (row < end)


def _zero_unseen(values: Ref, begin: Array | None, end: Array) -> None:
    """Zeroes the rows of a tile but [begin, end): what lies beyond a sequence's end, or is not loaded, may be NaN, and 0 * NaN is NaN."""
    has_others = end < KEY_TILE if begin is None else (end < KEY_TILE) | (begin > 0)

    @pl.when(has_others)
    def _zero() -> None:
        for d in range(0, values.shape[1], 64):
            part = values.at[:, pl.ds(d, 64)]
            loaded = plgpu.load(part, layout=WGMMA)
            part[...] = jnp.where(_is_seen(loaded.shape, begin, end, WGMMA), loaded, jnp.zeros_like(loaded))
        plgpu.commit_smem()


def _convert(stored: Ref, target: Ref, begin: Array | None, end: Array) -> None:
    """An 8-bit tile in the 16-bit type of `target`, rows but [begin, end) as zeros; end > 0. The caller commits shared memory."""
    # A real loop, so that each step reuses the registers of the last: its bound is a value that the compiler cannot know.
    parts = jnp.where(end > 0, stored.shape[1] // 64, 0)

    @pl.loop(0, parts)
    def _part(i: Array) -> None:
        columns = pl.ds(pl.multiple_of(i * 64, 64), 64)
        layout = plgpu.Layout.SMEM_GMEM_COPY((KEY_TILE, 64), target.dtype, 128)
        converted = plgpu.load(stored.at[:, columns], layout=layout, optimized=False).astype(target.dtype)
        seen = _is_seen(converted.shape, begin, end, layout)
        target.at[:, columns][...] = jnp.where(seen, converted, jnp.zeros_like(converted))


def _load_scales(scales: Ref) -> Array:
    return plgpu.load(scales, layout=WGMMA.reduce(1), optimized=False)
