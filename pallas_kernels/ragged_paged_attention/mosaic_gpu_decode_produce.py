"""The producing warpgroup of the Hopper decode kernel: queries and pages to shared memory, tiles ahead of their use."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import copy_tile, first_visible_key
from pallas_kernels.ragged_paged_attention.mosaic_gpu_decode_call import Call, Tile, copied_keys


def produce(call: Call) -> None:
    """Copies the queries of each unit, and the pages of each tile."""
    layer_row = call.layer[0] * call.num_pages
    consumed, stages = call.scratch["consumed"], call.tuning.stages

    def visit(tile: Tile) -> tuple[Any, ...]:
        pl.when(tile.i >= stages)(lambda: plgpu.barrier_wait(consumed.at[tile.slot]))

        @pl.when(tile.opens)
        def _queries() -> None:
            target, full = (call.scratch[name].at[tile.query_slot] for name in ("queries", "queries_full"))
            plgpu.copy_gmem_to_smem(call.queries.at[tile.seq, tile.head], target, full)

        for which, name in enumerate(("keys", "values")):
            _copy(call, tile, layer_row, which, name)
        return ()

    count = call.for_tiles(visit)
    # Every completed phase of a barrier is observed before the block ends.
    drained = jnp.minimum(count, stages)
    pl.loop(count - drained, count)(lambda i: plgpu.barrier_wait(consumed.at[lax.rem(i, jnp.int32(stages))]))


def _copy(call: Call, tile: Tile, layer_row: Array, which: int, name: str) -> None:
    """Starts the copies of the tile's keys (0) or values (1)."""
    spec = call.spec
    dynamic = spec.scales == "token"
    copy_tile(
        spec,
        pool=call.pool,
        scales=call.scales if dynamic else None,
        first_row=lambda page: ((layer_row + page) * 2 + which) * spec.num_kv_heads + tile.head,
        page_ids=call.table.at[tile.sequence],
        key0=tile.key0,
        kv_len=tile.kv_len,
        rows=copied_keys(spec),
        first_key=None if spec.sliding_window is None else first_visible_key(spec, tile.kv_len - 1),
        tile=call.scratch[name].at[tile.slot],
        tile_scales=call.scratch["scales"].at[tile.slot, which] if dynamic else None,
        barrier=call.scratch["full"].at[tile.slot],
    )
