"""What a call costs, counted by the rules that the kernels cut their work by: for tests, tuning and inspection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.flash_attention import mosaic_gpu, mosaic_tpu
from pallas_kernels.flash_attention.tuning import Blocks, Tiles
from pallas_kernels.hopper.warpgroups import CONSUMERS, ROWS
from pallas_kernels.scoring import Scoring


@dataclass(frozen=True, slots=True)
class Work:
    """tiles: of `rows` x `keys` scores, that are multiplied. flops: of both products over them.

    kv_bytes: of keys and values that are copied into the memory of a core, once for each block of queries.
    """

    tiles: int
    rows: int
    keys: int
    flops: int
    kv_bytes: int


def on_tpu(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: Any, lens: Sequence[tuple[int, int]], scoring: Scoring,
    blocks: Blocks,
) -> Work:  # fmt: skip
    """Of `mosaic_tpu.attend`; lens: (queries, keys) of each sequence. With head_dim 64 the products are 128 deep and wide."""
    plan = mosaic_tpu.make_plan(q_shape, k_shape, dtype, blocks)
    groups = -(-k_shape[2] // plan.pair)

    def blocks_of(first: Any, q_len: int, kv_len: int) -> Any:
        return scoring.blocks(first, first + plan.queries - 1, q_len, kv_len, plan.keys)[1]

    tiles = groups * _total(blocks_of, q_shape[1], plan.queries, lens)
    block_bytes = 2 * plan.keys * plan.lanes * jnp.dtype(dtype).itemsize
    return Work(tiles, plan.rows, plan.keys, 4 * tiles * plan.rows * plan.keys * plan.lanes, tiles * block_bytes)


def on_gpu(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: Any, lens: Sequence[tuple[int, int]], scoring: Scoring,
    tiles: Tiles,
) -> Work:  # fmt: skip
    """Of `mosaic_gpu.attend`; lens: as above. Two warpgroups share what is copied."""
    kernel = mosaic_gpu.make_kernel(q_shape, k_shape, scoring, tiles)

    def visits(rows: int) -> int:
        def tiles_of(row: Any, q_len: int, kv_len: int) -> Any:
            return kernel.key_tiles(row, rows, q_len, kv_len)[1]

        return kernel.heads * _total(tiles_of, q_shape[1] * kernel.pack, rows, lens)

    multiplied, copied = visits(ROWS), visits(CONSUMERS * ROWS)
    per_tile = tiles.keys * kernel.head_dim
    return Work(
        multiplied,
        ROWS,
        tiles.keys,
        4 * multiplied * ROWS * per_tile,
        copied * 2 * per_tile * jnp.dtype(dtype).itemsize,
    )


def _total(count: Callable[[Any, int, int], Any], rows: int, step: int, lens: Sequence[tuple[int, int]]) -> int:
    """The sum of count(first row, queries, keys) over blocks of `step` rows and sequences."""
    first = jnp.arange(0, rows, step, dtype=jnp.int32)
    return sum(int(count(first, q_len, kv_len).sum()) for q_len, kv_len in lens)
