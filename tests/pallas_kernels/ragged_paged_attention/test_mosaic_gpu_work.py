"""How much work the Hopper kernels plan: the bytes that decoding loads, the tiles that prefill multiplies."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.ragged_paged_attention import mosaic_gpu
from pallas_kernels.ragged_paged_attention import mosaic_gpu_decode as decode
from pallas_kernels.ragged_paged_attention import mosaic_gpu_prefill_plan as prefill_plan
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import KEY_TILE, CallSpec

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def spec_of(page_size: int, dtype: str = "bfloat16", window: int | None = None) -> CallSpec:
    """Llama-3-8B's shape."""
    layout = KVLayout(1, KV_HEADS, HEAD_DIM, page_size, dtype, scales="none" if dtype == "bfloat16" else "token")
    return mosaic_gpu.call_spec(layout, num_heads=HEADS, scale=1.0, sliding_window=window)


def decoded_tiles(spec: CallSpec, lens: np.ndarray) -> tuple[list[tuple[int, int, int]], list[int]]:
    """(sequence, head, first key) of every tile that a block visits, from the tables that the kernel reads; tiles of each block."""
    order = jnp.argsort(jnp.asarray(lens) <= 0, stable=True).astype(jnp.int32)
    work = decode._plan(spec, mosaic_gpu.decode_tuning(spec), order, jnp.asarray(lens, jnp.int32))
    sequences, blocks = np.asarray(work.sequences), np.asarray(work.blocks)
    visited = []
    for row, head, tile, count in blocks:
        for _ in range(count):
            sequence, _, first, tiles = sequences[row]
            visited.append((int(sequence), int(head), int(first + tile) * KEY_TILE))
            tile += 1
            if tile == tiles:
                tile, head = 0, head + 1
            if head == KV_HEADS:
                head, row = 0, row + 1
    return visited, blocks[:, 3].tolist()


@pytest.mark.parametrize(
    ("page_size", "dtype"),
    [(16, "bfloat16"), (32, "bfloat16"), (64, "bfloat16"), (128, "int8"), (256, "float8_e4m3fn")],
)
@pytest.mark.parametrize(
    ("window", "most"), [(None, 1.05), (4096, 1.05), (2047, 1.05), (1024, 1.05), (512, 1.06), (128, 1.22)]
)
def test_decoding_loads_little_more_than_the_keys_and_values(
    page_size: int, dtype: str, window: int | None, most: float
) -> None:
    """A window begins and ends inside copies of 16 keys or more, which adds 15 keys on average; queries are 16-bit, whatever the pool."""
    spec = spec_of(page_size, dtype, window)
    rng = np.random.default_rng(0)
    lens = rng.integers(1500, 2600, 64) if window is None else window + rng.integers(300, 1400, 64)
    lens[[3, 9]] = 0
    visited, per_block = decoded_tiles(spec, lens)
    assert len(set(visited)) == len(visited)
    assert max(per_block) - min(per_block) <= 1

    step = decode.copied_keys(spec)  # those that hold no key that is seen are not made
    begins = lens * 0 if window is None else np.maximum(lens - window, 0)
    copies = [(s, at) for s, _, key in visited for at in range(key, key + KEY_TILE, step)]
    loaded = step * sum(at < lens[s] and at + step > begins[s] for s, at in copies)
    per_token = 2 * (HEAD_DIM * jnp.dtype(dtype).itemsize + (4 if spec.scales == "token" else 0))
    queries = 2 * HEAD_DIM * decode.padded_group(spec) * (KV_HEADS * np.count_nonzero(lens) + len(per_block))
    seen = lens - begins
    assert loaded * per_token + queries <= most * KV_HEADS * seen.sum() * per_token


def test_a_batch_of_decodes_leaves_nothing_to_prefill() -> None:
    """Its cost is then that of the decode kernel, and the start of one that finds no work."""
    spec = spec_of(64)
    tuning = mosaic_gpu.prefill_tuning(spec)
    lens = jnp.full(8, 500, jnp.int32)
    _, count = prefill_plan.plan(spec, tuning, 8, jnp.arange(9), jnp.zeros(8, jnp.int32), lens)
    assert count == 0
    assert len(decoded_tiles(spec, np.asarray(lens))[0]) == 8 * KV_HEADS * -(-500 // KEY_TILE)


@pytest.mark.parametrize("window", [None, 4, 1024])
def test_prefill_multiplies_what_causality_asks_for(window: int | None) -> None:
    """The tiles of the plan, against a mask made key by key: every query once, and few tiles that no query sees."""
    spec = spec_of(64, window=window)
    tuning = mosaic_gpu.prefill_tuning(spec)
    span = prefill_plan.Shape.of(spec).span
    q_lens, kv_lens = np.array([2048, 130, 0, 64, 7, 700]), np.array([2048, 2049, 40, 64, 4096, 700])
    cu = np.concatenate([[0], np.cumsum(q_lens)])
    tiles, count = prefill_plan.plan(spec, tuning, int(cu[-1]), *map(jnp.asarray, (cu, q_lens, kv_lens)))
    done = needed = exact = 0
    queries = []
    for sequence, row, position, tokens, kv_len in np.asarray(tiles)[: int(count)]:
        assert kv_len == kv_lens[sequence]
        assert position == kv_len - q_lens[sequence] + row - cu[sequence]
        queries += range(row, row + tokens)
        for begin in range(0, tokens, span):  # the rows of one warpgroup
            at = position + begin + np.arange(min(span, tokens - begin))[:, None]
            key = np.arange(kv_len)[None, :]
            seen = (key <= at) & (key > at - (window or kv_len + 1))
            done += prefill_plan.tile_steps(spec, tuning.keys, int(at[0, 0]), len(at)) * span * tuning.keys
            needed += len(np.unique(key[0, seen.any(axis=0)] // tuning.keys)) * span * tuning.keys
            exact += seen.sum()
    assert sorted(queries) == list(range(cu[-1]))
    assert needed <= done <= 1.1 * needed
    if window is None:
        assert done <= 1.15 * exact
