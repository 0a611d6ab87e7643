"""KV write on Hopper, interpreted: bit for bit what NumPy stores, scales included, and nothing else in the pool changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixtures.gpu_interpreter import gpu_interpreter

from pallas_kernels.absent_devices import why_unavailable
from pallas_kernels.inspection import nvidia
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write import mosaic_gpu
from pallas_kernels.kv_write.api import write_kv

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
LAYERS, LAYER, NUM_PAGES = 2, 1, 7
WHY_NOT = why_unavailable("h100")


def kind(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def stored(x: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rows over their scales: to the nearest number, saturated, FP8 without subnormal numbers."""
    y = np.clip(x / scale[..., None], -LARGEST[dtype], LARGEST[dtype])
    if dtype == "int8":
        return np.rint(y).astype(np.int8)
    least = float(ml_dtypes.finfo(kind(dtype)).smallest_normal)
    y = np.where(np.abs(y) < least / 2, 0, np.where(np.abs(y) < least, np.copysign(least, y), y))
    return y.astype(kind(dtype))


def random_write(layout: KVLayout, rows_dtype: str = "bfloat16") -> tuple[KVPages, list[np.ndarray], KVPages]:
    """A pool of random bytes (NaN among them), the arguments of a write with padding in it, and the pool that it must give."""
    rng = np.random.default_rng(3)
    T, K, page, D = 9, layout.num_kv_heads, layout.page_size, layout.head_dim
    shape = layout.pages_shape(NUM_PAGES)
    pages = rng.integers(0, 256, (*shape[:-1], shape[-1] * kind(layout.dtype).itemsize), np.uint8).view(
        kind(layout.dtype)
    )
    scales = None
    if layout.scales != "none":
        scales = rng.uniform(0.001, 0.05, layout.scales_shape(NUM_PAGES)).astype(np.float32)
    x = rng.standard_normal((2, T, K, D)) * rng.uniform(0.01, 3, (2, T, K, 1))
    x[0, 2, 0, 5] = 600  # an outlier
    x[1, 3, -1] = 0  # nothing but zeros
    x = x.astype(kind(rows_dtype))
    places = rng.permutation((NUM_PAGES - 1) * page)[:T]
    ids, offsets = (places // page).astype(np.int32), (places % page).astype(np.int32)
    ids[[4, 7, 8]], offsets[[4, 7, 8]] = NUM_PAGES - 1, 0  # padding, which all points at one place

    new_pages, new_scales = pages.copy(), None if scales is None else scales.copy()
    for t in range(T):
        for which in range(2):
            if ids[t] == NUM_PAGES - 1:
                continue
            row = x[which, t].astype(np.float32)
            if layout.scales == "none":
                new = x[which, t].astype(kind(layout.dtype))
            elif layout.scales == "static":
                new = stored(row, scales[LAYER, which], layout.dtype)
            else:
                peak = np.abs(row).max(-1)
                scale = np.where(
                    peak == 0,
                    np.float32(1),
                    np.maximum(peak * np.float32(1 / LARGEST[layout.dtype]), np.finfo(np.float32).tiny),
                )
                new = stored(row, scale, layout.dtype)
                new_scales[LAYER, ids[t], which, :, offsets[t]] = scale
            new_pages[LAYER, ids[t], which, :, offsets[t]] = new
    return KVPages(pages, scales), [x[0], x[1], ids, offsets], KVPages(new_pages, new_scales)


def run(layout: KVLayout, kv: KVPages, arguments: list[np.ndarray]) -> KVPages:
    with gpu_interpreter():
        write = jax.jit(lambda *args: write_kv(*args, layout=layout, backend="mosaic_gpu"), donate_argnums=0)
        return write(jax.tree.map(jnp.asarray, kv), jnp.int32(LAYER), *map(jnp.asarray, arguments))


def same_bytes(found: KVPages, expected: KVPages) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("dtype", "scales", "heads", "head_dim", "page", "rows"),
    [
        ("bfloat16", "none", 8, 64, 16, "bfloat16"),
        ("bfloat16", "none", 2, 128, 128, "float32"),
        ("float16", "none", 1, 64, 16, "float16"),
        ("int8", "token", 2, 256, 16, "bfloat16"),
        ("int8", "static", 4, 64, 64, "bfloat16"),
        ("float8_e4m3fn", "token", 3, 128, 64, "bfloat16"),
        ("float8_e4m3fn", "static", 1, 64, 16, "float32"),
        ("float8_e5m2", "token", 4, 64, 128, "bfloat16"),
        ("float8_e5m2", "static", 2, 128, 16, "bfloat16"),
    ],
)
def test_writes_exactly_the_rows(dtype: str, scales: str, heads: int, head_dim: int, page: int, rows: str) -> None:
    layout = KVLayout(LAYERS, heads, head_dim, page, dtype, scales=scales)
    kv, arguments, expected = random_write(layout, rows)
    assert same_bytes(run(layout, kv, arguments), expected)


@pytest.mark.interpret
def test_a_planted_wrong_place_is_noticed() -> None:
    layout = KVLayout(LAYERS, 2, 64, 16, "int8", scales="token")
    kv, arguments, expected = random_write(layout)
    arguments[3] = (arguments[3] + 1) % 16
    assert not same_bytes(run(layout, kv, arguments), expected)


@pytest.mark.interpret
def test_a_planted_race_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens for one place."""
    layout = KVLayout(LAYERS, 2, 64, 16, "bfloat16")
    kv, arguments, _ = random_write(layout)
    arguments[2][:2], arguments[3][:2] = 0, 5
    with pytest.raises(Exception, match="RACE DETECTED"):
        run(layout, kv, arguments)


@pytest.mark.aot
@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("heads", "head_dim"), [(8, 128), (1, 64), (2, 256)])
def test_compiles_in_place(dtype: str, heads: int, head_dim: int) -> None:
    scales = {"bfloat16": "none", "float8_e5m2": "static"}.get(dtype, "token")
    layout = KVLayout(4, heads, head_dim, 64, dtype, scales=scales)
    shape, num_pages, T = jax.ShapeDtypeStruct, 1000, 256
    scales_shape = layout.scales_shape(num_pages)
    kv = KVPages(
        shape(layout.pages_shape(num_pages), jnp.dtype(dtype)),
        None if scales_shape is None else shape(scales_shape, jnp.float32),
    )
    rows, ids = shape((T, heads, head_dim), jnp.bfloat16), shape((T,), jnp.int32)

    def layers(kv: KVPages, keys: jax.Array, values: jax.Array, pages: jax.Array, offsets: jax.Array) -> KVPages:
        def one(layer: jax.Array, kv: KVPages) -> KVPages:
            return write_kv(kv, layer, keys, values, pages, offsets, layout=layout, backend="mosaic_gpu")

        return jax.lax.fori_loop(0, 4, one, kv)

    compiled, [report] = nvidia.compile_for_h100(layers, kv, rows, rows, ids, ids, donate=(0,))
    assert report.name == mosaic_gpu.KERNEL_NAME
    assert (report.stack_bytes, report.spill_bytes) == (0, 0), report
    assert report.registers <= 64
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))
    assert memory.temp_size_in_bytes < 2**20
