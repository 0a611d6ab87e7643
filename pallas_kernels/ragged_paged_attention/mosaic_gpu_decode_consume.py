"""The consuming warpgroup of the Hopper decode kernel: both matmuls, transposed, and the online softmax over keys in rows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.memory import Ref
from pallas_kernels.hopper.softmax import NO_LOGIT, choose
from pallas_kernels.hopper.warpgroups import WGMMA
from pallas_kernels.mosaic_gpu_store import store
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import KEY_TILE, scaled_dots
from pallas_kernels.ragged_paged_attention.mosaic_gpu_decode_call import Call, Tile


def consume(call: Call) -> None:
    """Attention over each tile; a partial result is written where a unit ends."""
    D, N, s = call.spec.head_dim, call.columns, call.scratch

    def visit(tile: Tile, acc: Array, top: Array, total: Array) -> tuple[Array, Array, Array]:
        pl.when(tile.opens)(lambda: plgpu.barrier_wait(s["queries_full"].at[tile.query_slot]))
        plgpu.barrier_wait(s["full"].at[tile.slot])
        keys, values = _operands(call, tile)

        def key_dots(out: Ref) -> Array:
            plgpu.wgmma(out, keys, s["queries"].at[tile.query_slot].transpose((1, 0)))
            return out[...]

        dots = pl.run_scoped(key_dots, plgpu.WGMMAAccumulatorRef((KEY_TILE, N), jnp.float32))
        seen, top, total, weights, shrink = _softmax(call, tile, dots, top, total)
        _stage_weights(call, tile, seen, weights)

        def weighted_values(out: Ref) -> Array:
            plgpu.wgmma(out, values.transpose((1, 0)), s["weights"].transpose((1, 0)))
            return out[...]

        gained = pl.run_scoped(weighted_values, plgpu.WGMMAAccumulatorRef((D, N), jnp.float32))
        plgpu.barrier_arrive(s["consumed"].at[tile.slot])
        acc = choose(tile.opens, jnp.zeros_like(acc), acc) * lax.broadcast_in_dim(shrink, acc.shape, [1]) + gained
        pl.when(tile.closes)(lambda: _write(call, tile, acc, top, total))
        return acc, top, total

    call.for_tiles(
        visit,
        plgpu.layout_cast(jnp.zeros((D, N), jnp.float32), WGMMA),
        plgpu.layout_cast(jnp.full((N,), NO_LOGIT, jnp.float32), WGMMA.reduce(0)),
        plgpu.layout_cast(jnp.zeros((KEY_TILE, N), jnp.float32), WGMMA),
    )


def _operands(call: Call, tile: Tile) -> tuple[Ref, Ref]:
    """Keys and values in 16 bits; values of keys that are not seen are zero."""
    s, seen = call.scratch, tile.seen(call.spec)
    keys, values = (s[name].at[tile.slot] for name in ("keys", "values"))
    if not call.spec.quantized:
        _zero_unseen(values, *seen)
        return keys, values
    # Always 0, but not to the compiler: with a constant address it would keep the descriptors of all `wgmma`
    # operands in registers throughout (60 of them at head_dim 256).
    zero = jnp.where(tile.kv_len > tile.key0, 0, 1)
    keys16, values16 = (s[name].at[zero] for name in ("keys16", "values16"))
    _convert(keys, keys16, *seen)
    _convert(values, values16, *seen)
    plgpu.commit_smem()
    return keys16, values16


def _softmax(call: Call, tile: Tile, dots: Array, top: Array, total: Array) -> tuple[Array, Array, Array, Array, Array]:
    """(which numbers are seen, top, total, weights, factor by which earlier results shrink) with the tile's dots [keys, columns]."""
    spec = call.spec
    key_scale = call.static_scale(0, tile.head)
    if spec.scales == "token":
        key_scale = lax.broadcast_in_dim(_load_scales(call.scratch["scales"].at[tile.slot, 0]), dots.shape, [0])
    scores, factor = scaled_dots(spec, dots, key_scale)
    key_at = tile.key0 + plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=WGMMA)
    seen = key_at < tile.kv_len
    if spec.sliding_window is not None:
        seen &= key_at >= tile.kv_len - spec.sliding_window
    scores = jnp.where(seen, scores, -jnp.inf)
    before = choose(tile.opens, jnp.full_like(top, NO_LOGIT), top)
    top = jnp.maximum(before, scores.max(axis=0) * factor)
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(top, scores.shape, [1]))
    shrink = jnp.exp2(before - top)
    # Summed over keys once, when the unit closes: a thread keeps its own part until then.
    kept = choose(tile.opens, jnp.zeros_like(total), total) * lax.broadcast_in_dim(shrink, scores.shape, [1])
    return seen, top, kept + weights, weights, shrink


def _stage_weights(call: Call, tile: Tile, seen: Array, weights: Array) -> None:
    """Brings the weights to shared memory, times the scales of the values where each token has one."""
    if call.spec.scales == "token":
        value_scale = _load_scales(call.scratch["scales"].at[tile.slot, 1]) * call.spec.value_gain
        weights = jnp.where(seen, weights * lax.broadcast_in_dim(value_scale, weights.shape, [0]), 0.0)
    weights = plgpu.layout_cast(weights.astype(call.spec.compute_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    call.scratch["weights"].transpose((1, 0))[...] = weights
    plgpu.commit_smem()


def _write(call: Call, tile: Tile, acc: Array, top: Array, total: Array) -> None:
    """Stores the partial result of a unit."""
    at = call.block + tile.seq * call.spec.num_kv_heads + tile.head
    value_scale = call.static_scale(1, tile.head)
    if value_scale is not None:
        acc = acc * value_scale
    elif call.spec.value_gain != 1.0:
        acc = acc * (1.0 / call.spec.value_gain)
    store(call.acc.at[at], acc)
    store(call.stats.at[at, 0], top)
    store(call.stats.at[at, 1], total.sum(axis=0))


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
