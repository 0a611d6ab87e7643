"""Scales per token in pools that TPU kernels read: what is written is read back, on one device and on several."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_layout import KVLayout, KVPages, read_pages
from pallas_kernels.kv_write import reference


@pytest.mark.parametrize(
    ("K", "shards", "page", "dtype"),
    [(3, 1, 16, "int8"), (8, 1, 64, "float8_e4m3fn"), (4, 4, 16, "float8_e4m3fn"), (6, 2, 384, "float8_e5m2")],
)
def test_written_pages_are_read_back(K: int, shards: int, page: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    whole = KVLayout(2, K, 64, page, dtype, "token_major", "token", shards)
    layout = dataclasses.replace(whole, num_kv_heads=K // shards, shards=1)
    # Sizes far apart: another token's or head's scale would not go unnoticed.
    size = 2.0 ** rng.integers(-10, 10, (2, page, K, 1))
    keys, values = (rng.standard_normal((2, page, K, 64)) * size).astype(np.float32)
    order = rng.permutation(page)
    offsets, page_ids = jnp.asarray(order, jnp.int32), jnp.full(page, 2, jnp.int32)
    parts = []
    for device in range(shards):
        heads = slice(device * K // shards, (device + 1) * K // shards)
        pool = KVPages(jnp.zeros(layout.pages_shape(4), dtype), jnp.full(layout.scales_shape(4), jnp.nan))
        new = (jnp.asarray(array[order][:, heads]) for array in (keys, values))
        parts.append(reference.write(pool, jnp.int32(1), *new, page_ids, offsets, layout=layout))
    pages = jnp.concatenate([part.pages for part in parts], axis=whole.pages_head_axis)
    scales = jnp.concatenate([part.scales for part in parts], axis=whole.scales_head_axis)
    assert scales.shape == whole.scales_shape(4)
    found = read_pages(KVPages(pages, scales), jnp.int32(1), jnp.array([2]), whole, jnp.dtype(jnp.float32))
    for got, expected in zip(found, (keys, values), strict=True):
        wanted = np.moveaxis(expected, 1, 0)[None]  # [one page, K, page, D]
        step = np.abs(wanted).max(-1, keepdims=True) * (2**-3 if dtype == "float8_e5m2" else 2**-4)
        assert (np.abs(np.asarray(got) - wanted) <= step).all()
