"""What flash attention refuses, by name and limit, and how much of the score matrix its kernels multiply."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.flash_attention import work
from pallas_kernels.flash_attention.api import check_supported, flash_attention
from pallas_kernels.flash_attention.tuning import Blocks, blocks_for, tiles_for
from pallas_kernels.scoring import Scoring

HEADS: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("backend", "change", "message"),
    [
        ("mosaic_tpu", {"head_dim": 96}, "'mosaic_tpu' takes head_dim 64, 128 or 256, not 96"),
        ("mosaic_gpu", {"head_dim": 80}, "'mosaic_gpu' takes head_dim 64, 128 or 256, not 80"),
        ("mosaic_tpu", {"dtype": "float16"}, "'mosaic_tpu' takes bfloat16 or float32, not float16"),
        ("mosaic_gpu", {"dtype": "float32"}, "'mosaic_gpu' takes bfloat16 or float16, not float32"),
        ("mosaic_gpu", {"num_heads": 34}, "1 to 16 query heads per KV head, not 34 over 2"),
        ("reference", {"num_heads": 9}, "9 query heads cannot be grouped over 2 KV heads"),
        ("reference", {"dtype": "int8"}, "dtype int8 is not supported"),
        ("mosaic", {}, "backend 'mosaic' is unknown: it must be one of reference, cpu_native"),
    ],
)
def test_what_a_backend_cannot_do(backend: str, change: dict[str, Any], message: str) -> None:
    for known in ("reference", "cpu_native", "mosaic_tpu", "mosaic_gpu"):
        check_supported(known, **HEADS)
    with pytest.raises(ValueError, match=message):
        check_supported(backend, **HEADS | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding window of 0 keys"),
        ({"sliding_window": 4, "causal": False}, "sliding window of 4 keys with causal=False"),
        ({"logit_soft_cap": -1.0}, "soft cap of -1.0"),
        ({"q_lens": jnp.zeros(3, jnp.int32)}, r"q_lens of shape \(3,\) .* must be \[2\]"),
        ({"sinks": jnp.zeros(2)}, r"sinks of shape \(2,\) .* must be \[4\]"),
        ({"v": jnp.zeros((2, 6, 2, 64), jnp.bfloat16)}, r"must be \[B, Tq, H, D\]"),
        ({"v": jnp.zeros((2, 7, 2, 64), jnp.float32)}, "one dtype, not bfloat16, bfloat16 and float32"),
        ({"backend": "mosaic_gpu", "q": jnp.zeros((2, 5, 34, 64), jnp.bfloat16)}, "34 over 2"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    shapes = {"q": (2, 5, 4, 64), "k": (2, 7, 2, 64), "v": (2, 7, 2, 64)}
    arguments: dict[str, Any] = {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        flash_attention(**{**arguments, "scale": 1.0, "causal": True} | change)


def test_no_queries_or_no_keys_at_all() -> None:
    for Tq, Tk in ((0, 7), (5, 0)):
        q, k = jnp.ones((1, Tq, 2, 64)), jnp.ones((1, Tk, 2, 64))
        out = flash_attention(q, k, k, scale=1.0, causal=True)
        assert out.shape == q.shape
        assert not out.any()


LENS = [(2048, 2048), (130, 517), (1024, 5000), (7, 4096), (517, 130), (0, 40), (300, 0)]


def needed(scoring: Scoring, q_len: int, kv_len: int, rows: int, tokens_of: Any, keys: int) -> int:
    """Tiles of `rows` rows x `keys` keys of one head that hold a pair which is seen, from the mask itself."""
    at, key = np.arange(kv_len - q_len, kv_len)[:, None], np.arange(kv_len)[None]
    seen = np.ones((q_len, kv_len), bool) if not scoring.causal else key <= at
    if scoring.sliding_window is not None:
        seen &= key > at - scoring.sliding_window
    seen = np.repeat(seen, tokens_of, axis=0)
    seen = np.pad(seen, ((0, -len(seen) % rows), (0, -kv_len % keys)))
    return int(seen.reshape(len(seen) // rows, rows, seen.shape[1] // keys, keys).any(axis=(1, 3)).sum())


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 1024)])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("lens", LENS, ids=str)
def test_no_tile_is_multiplied_or_fetched_that_no_query_sees(
    lens: tuple[int, int], group: int, causal: bool, window: int | None
) -> None:
    q_len, kv_len = lens
    K, D = 2, 128
    scoring = Scoring(1.0, causal, window)
    q_shape, k_shape = (1, max(q_len, 1), K * group, D), (1, max(kv_len, 1), K, D)

    blocks = blocks_for("TPU v6 lite", D)
    tpu = work.on_tpu(q_shape, k_shape, "bfloat16", [lens], scoring, blocks)
    tokens = tpu.rows // group
    assert tpu.tiles == K * needed(scoring, *lens, tokens, 1, tpu.keys)
    assert tpu.flops == 4 * tpu.tiles * tpu.rows * tpu.keys * D
    assert tpu.kv_bytes == tpu.tiles * 2 * tpu.keys * D * 2

    gpu = work.on_gpu(q_shape, k_shape, "bfloat16", [lens], scoring, tiles_for("NVIDIA H100 80GB HBM3", D))
    packed = group if q_len < 128 else 1
    heads = K * group // packed
    assert gpu.tiles == heads * needed(scoring, *lens, 64, packed, gpu.keys)
    assert gpu.flops == 4 * gpu.tiles * 64 * gpu.keys * D
    assert gpu.kv_bytes == heads * needed(scoring, *lens, 128, packed, gpu.keys) * 2 * gpu.keys * D * 2


def test_a_long_causal_prompt_costs_little_more_than_its_pairs() -> None:
    T, H, K, D = 8192, 32, 8, 128
    pairs = 4 * H * D * T * (T + 1) // 2
    scoring = Scoring(1.0, True)
    shapes = (1, T, H, D), (1, T, K, D)
    assert work.on_tpu(*shapes, "bfloat16", [(T, T)], scoring, Blocks(1024, 512, 0)).flops < 1.1 * pairs
    tiles = tiles_for("NVIDIA H100 80GB HBM3", D)
    assert work.on_gpu(*shapes, "bfloat16", [(T, T)], scoring, tiles).flops < 1.02 * pairs


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5p", "TPU v6 lite"])
def test_a_chip_gets_its_own_blocks(kind: str) -> None:
    for head_dim in (64, 128, 256):
        assert blocks_for(kind, head_dim).keys % 128 == 0
    assert (blocks_for(kind, 128).vmem_limit < 2**24) == (kind == "TPU v4")
