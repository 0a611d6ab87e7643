"""Page copy: whole pages with their scales, in every layer, and nothing else; on Hopper interpreted and compiled, and in XLA."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.gpu_interpreter import gpu_interpreter
from fixtures.tpu_interpreter import watching
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.absent_devices import why_unavailable
from pallas_kernels.inspection import nvidia
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.page_copy import mosaic_gpu
from pallas_kernels.page_copy.api import check_supported, copy_pages

NUM_PAGES = 9
WHY_NOT = why_unavailable("h100")
INTERPRETERS = {
    "reference": contextlib.nullcontext,
    "cpu_native": contextlib.nullcontext,
    "mosaic_gpu": gpu_interpreter,
    "mosaic_tpu": lambda: pltpu.force_tpu_interpret_mode(watching()),
}


def random_pool(layout: KVLayout) -> KVPages:
    """Random bytes, NaN among them."""
    rng = np.random.default_rng(1)
    shape, kind = layout.pages_shape(NUM_PAGES), jnp.dtype(layout.dtype)
    pages = rng.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8).view(kind)
    scales_shape = layout.scales_shape(NUM_PAGES)
    return KVPages(pages, None if scales_shape is None else rng.random(scales_shape, np.float32))


def check(backend: str, layout: KVLayout, src: list[int], dst: list[int]) -> None:
    kv = random_pool(layout)
    real = [(s, d) for s, d in zip(src, dst, strict=True) if d != NUM_PAGES - 1]
    expected = KVPages(kv.pages.copy(), None if kv.scales is None else kv.scales.copy())
    for s, d in real:
        expected.pages[:, d] = kv.pages[:, s]
        if layout.scales == "token":
            expected.scales[:, d] = kv.scales[:, s]
    ids = (jnp.array(src, jnp.int32), jnp.array(dst, jnp.int32))
    with INTERPRETERS[backend]():
        copy = jax.jit(lambda *args: copy_pages(*args, layout=layout, backend=backend), donate_argnums=0)
        found = copy(jax.tree.map(jnp.asarray, kv), *ids)
        for got, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.asarray(got).tobytes() == wanted.tobytes()


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("dtype", "scales", "heads", "head_dim", "page"),
    [
        ("bfloat16", "none", 2, 64, 16),
        ("bfloat16", "none", 1, 128, 256),
        ("int8", "token", 3, 64, 16),
        ("float8_e4m3fn", "static", 2, 256, 64),
    ],
)
def test_copies_on_hopper(dtype: str, scales: str, heads: int, head_dim: int, page: int) -> None:
    """Two pages from one, and padding."""
    layout = KVLayout(2, heads, head_dim, page, dtype, scales=scales)
    check("mosaic_gpu", layout, [3, 8, 5, 3, 0], [0, 8, 7, 1, 8])


@pytest.mark.parametrize("backend", ["reference", "cpu_native"])
@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", "none"), ("int8", "token"), ("int8", "static")])
def test_copies_through_xla(backend: str, dtype: str, scales: str) -> None:
    check(backend, KVLayout(3, 2, 16, 4, dtype, scales=scales), [3, 8, 5, 3, 0], [0, 8, 7, 1, 8])


@pytest.mark.interpret
@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", "none"), ("int8", "token")])
def test_copies_on_tpu(dtype: str, scales: str) -> None:
    check("mosaic_tpu", KVLayout(2, 2, 64, 128, dtype, "token_major", scales), [3, 8, 5, 3, 0], [0, 8, 7, 1, 8])


@pytest.mark.parametrize("backend", ["mosaic_gpu", "mosaic_tpu"])
def test_nothing_but_padding(backend: str) -> None:
    order = "token_major" if backend == "mosaic_tpu" else "head_major"
    check(backend, KVLayout(2, 2, 64, 16, "bfloat16", order), [8, 0], [8, 8])


@pytest.mark.interpret
def test_a_planted_race_is_caught() -> None:
    """One page is a target and a source."""
    with pytest.raises(Exception, match="RACE DETECTED"):
        check("mosaic_gpu", KVLayout(1, 1, 64, 16, "bfloat16"), [3, 4], [4, 5])


@pytest.mark.parametrize(
    ("backend", "layout", "message"),
    [
        ("mosaic_gpu", KVLayout(1, 1, 64, 192, "bfloat16"), "up to 128 tokens or a multiple of it, not 192"),
        ("mosaic_gpu", KVLayout(1, 1, 64, 16, "bfloat16", "token_major"), "head_major pools, not token_major"),
        ("mosaic_tpu", KVLayout(1, 1, 64, 16, "bfloat16"), "token_major pools, not head_major"),
    ],
)
def test_what_it_cannot_copy_is_an_error(backend: str, layout: KVLayout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_supported(backend, layout)
    with pytest.raises(ValueError, match=message):
        check(backend, layout, [3], [0])


def test_ids_come_in_pairs() -> None:
    layout = KVLayout(1, 1, 64, 16, "bfloat16")
    with pytest.raises(ValueError, match="pairs of ids"):
        copy_pages(random_pool(layout), jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.int32), layout=layout)


@pytest.mark.aot
@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
@pytest.mark.parametrize(
    ("dtype", "scales", "head_dim", "page"),
    [("bfloat16", "none", 256, 64), ("int8", "token", 64, 16), ("float8_e5m2", "token", 128, 256)],
)
def test_compiles_in_place(dtype: str, scales: str, head_dim: int, page: int) -> None:
    layout = KVLayout(4, 8, head_dim, page, dtype, scales=scales)
    shape, ids = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((16,), jnp.int32)
    scales_shape = layout.scales_shape(1000)
    kv = KVPages(
        shape(layout.pages_shape(1000), jnp.dtype(dtype)),
        None if scales_shape is None else shape(scales_shape, jnp.float32),
    )

    def copy(kv: KVPages, src: jax.Array, dst: jax.Array) -> KVPages:
        return copy_pages(kv, src, dst, layout=layout, backend="mosaic_gpu")

    compiled, [report] = nvidia.compile_for_h100(copy, kv, ids, ids, donate=(0,))
    assert report.name == mosaic_gpu.KERNEL_NAME
    assert (report.stack_bytes, report.spill_bytes) == (0, 0), report
    assert report.registers <= 32
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kv))
    assert memory.temp_size_in_bytes < 2**20
