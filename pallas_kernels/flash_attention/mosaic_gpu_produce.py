"""The producing warpgroup of the Hopper flash attention kernel: queries, keys and values to shared memory."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.flash_attention.mosaic_gpu_call import Call
from pallas_kernels.hopper.memory import ROW_BLOCKS, Ref
from pallas_kernels.hopper.warpgroups import CONSUMERS, ROWS


def produce(call: Call) -> None:
    """Copies queries, and tiles of keys and values into their rings."""
    tile, keys, s = call.tile(), call.kernel.tiles.keys, call.scratch
    key_ring, value_ring = call.rings

    @pl.when(tile.high > tile.low)
    def _queries() -> None:
        for wg in range(CONSUMERS):
            rows = pl.ds(pl.multiple_of(tile.row + wg * ROWS, ROWS), ROWS)
            plgpu.copy_gmem_to_smem(call.q.at[tile.batch, rows, tile.head], s["rows"].at[wg], s["queries"].at[wg])

    # Rows beyond the array come as zeros; those between the sequence's end and the array's may hold NaN.
    unclean = jnp.where(tile.kv_len < call.kernel.num_keys, lax.div(tile.kv_len, jnp.int32(keys)), tile.high)

    @pl.loop(tile.low, tile.high)
    def _copy(j: Array) -> None:
        t = j - tile.low
        at = pl.ds(pl.multiple_of(j * keys, keys), keys)
        k_tile = key_ring.claim(t)
        plgpu.copy_gmem_to_smem(call.k.at[tile.batch, at, tile.kv_head], k_tile, key_ring.filling(t))
        v_tile, full = value_ring.claim(t), value_ring.filling(t)
        source = call.v.at[tile.batch, at, tile.kv_head]
        pl.when(j != unclean)(lambda: plgpu.copy_gmem_to_smem(source, v_tile, full))

        @pl.when(j == unclean)
        def _cleaned() -> None:
            plgpu.copy_gmem_to_smem(source, v_tile, s["tail"])
            plgpu.barrier_wait(s["tail"])
            _zero_tail(v_tile, tile.kv_len - j * keys)
            plgpu.barrier_arrive(full)

    for ring in (key_ring, value_ring):
        ring.drain(tile.high - tile.low)


def _zero_tail(values: Ref, valid: Array) -> None:
    """Zeroes the rows from `valid` on: they may be NaN, and 0 * NaN is NaN."""
    keys, D = values.shape

    @pl.loop(lax.div(valid, jnp.int32(8)), keys // 8)
    def _rows(i: Array) -> None:
        for d in range(0, D, 64):
            part = values.at[pl.ds(pl.multiple_of(i * 8, 8), 8), pl.ds(d, 64)]
            loaded = plgpu.load(part, layout=ROW_BLOCKS, optimized=False)
            row = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 0, layout=ROW_BLOCKS)
            part[...] = jnp.where(row < valid - i * 8, loaded, jnp.zeros_like(loaded))

    plgpu.commit_smem()
