"""KV write on TPU: rows and scales exact, bit for bit, and nothing else in the pool changes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixtures.tpu_ahead_of_time import compile_on, mesh_of, needs_libtpu
from fixtures.tpu_interpreter import watching
from jax.sharding import PartitionSpec as P

from pallas_kernels import kv_orders_tpu
from pallas_kernels.kv_write.mosaic_tpu import write

LANES = 256


def _numbers(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = rng.standard_normal(shape) * (30 if kind.itemsize == 1 else 1)
    return np.round(x).astype(kind) if dtype == "int8" else x.astype(kind)


def _places(page: int, num_pages: int, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Pages and offsets of a step's tokens, 5 rows of padding last."""
    free = list(rng.permutation(num_pages - 1))
    page_ids, offsets = [], []
    # (first position, tokens): decodes, a chunk over several tiles and pages, a chunk that starts inside a tile
    for position, tokens in [(5, 1), (0, 70), (15, 1), (16, 1), (9, 20), (31, 3), *[(k, 1) for k in range(10)]]:
        ids = [free.pop() for _ in range((position + tokens - 1) // page - position // page + 1)]
        for at in range(position, position + tokens):
            page_ids.append(ids[at // page - position // page])
            offsets.append(at % page)
    return page_ids + [num_pages - 1] * 5, [*offsets, 0, 0, 3, 1, 0]


def _same(a: jax.Array | np.ndarray, b: np.ndarray) -> bool:
    return np.asarray(a).tobytes() == b.tobytes()


@pytest.mark.interpret
@pytest.mark.parametrize("dma", ["on_wait", "eager"])
@pytest.mark.parametrize(("dtype", "page"), [("bfloat16", 16), ("float32", 32), ("int8", 128), ("float8_e4m3fn", 64)])
def test_writes_exactly_the_rows(dtype: str, page: int, dma: str) -> None:
    rng = np.random.default_rng(3)
    num_pages = 24
    pages = _numbers((2, num_pages, page, LANES), dtype, rng)
    if dtype != "int8":
        pages[0] = np.nan  # what is not addressed stays, NaN bits included
    page_ids, offsets = _places(page, num_pages, rng)
    T = len(page_ids)
    stored = _numbers((T, LANES), dtype, rng)
    rows = stored if dtype == "float32" else stored.astype(ml_dtypes.bfloat16)
    expected = pages.copy()
    for t in range(T - 5):
        expected[1, page_ids[t], offsets[t]] = stored[t]
    got, none = jax.jit(write, static_argnames="interpret")(
        pages, None, jnp.int32(1), rows, None, jnp.array(page_ids), jnp.array(offsets), interpret=watching(dma)
    )
    assert none is None
    assert _same(got, expected)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("dtype", "page", "num_kv_heads", "dma"),
    [
        ("int8", 128, 8, "on_wait"),  # a row for each head
        ("int8", 16, 3, "eager"),  # eight heads in a row, lanes to spare
        ("float8_e4m3fn", 64, 2, "on_wait"),  # two heads in a row, even tokens first
        ("float8_e5m2", 256, 1, "eager"),  # two pieces in a page
    ],
)
def test_writes_exactly_the_scales(dtype: str, page: int, num_kv_heads: int, dma: str) -> None:
    rng = np.random.default_rng(4)
    num_pages = 24
    pages = _numbers((2, num_pages, page, LANES), dtype, rng)
    shape = kv_orders_tpu.token_scales_shape(2, num_pages, page, num_kv_heads)
    pool_scales = np.full(shape, np.nan, np.float32)
    pool_scales[1] = rng.random(shape[1:], np.float32)
    page_ids, offsets = _places(page, num_pages, rng)
    if page == 256:
        offsets = [offset + 100 for offset in offsets]  # chunks cross from piece to piece
    T = len(page_ids)
    rows, scales = _numbers((T, LANES), dtype, rng), rng.random((T, 2 * num_kv_heads), np.float32)
    scales[3] = np.nan  # stays with its token
    got_pages, got = jax.jit(write, static_argnames="interpret")(
        pages, pool_scales, jnp.int32(1), rows.astype(ml_dtypes.bfloat16), scales, jnp.array(page_ids), jnp.array(offsets),
        interpret=watching(dma),
    )  # fmt: skip

    def of_tokens(pool: np.ndarray) -> np.ndarray:
        """[L, P, page, heads]; lanes that hold no scale are left out."""
        keys, values = kv_orders_tpu.split_token_scales(jnp.asarray(pool), page, num_kv_heads, dtype)
        return np.stack([keys, values], axis=-1).reshape(2, num_pages, page, -1)

    expected = of_tokens(pool_scales).copy()
    expected[1, page_ids[: T - 5], offsets[: T - 5]] = scales[: T - 5]
    assert _same(of_tokens(got), expected)
    pages[1, page_ids[: T - 5], offsets[: T - 5]] = rows[: T - 5]
    assert _same(got_pages, pages)


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
@pytest.mark.parametrize(
    ("dtype", "page", "num_kv_heads"),
    [
        ("bfloat16", 16, None),
        ("float32", 16, None),
        ("int8", 16, 8),
        ("int8", 128, 8),
        ("float8_e4m3fn", 64, 1),
        ("float8_e5m2", 256, 2),
    ],
)
def test_compiles_in_place(chip: str, dtype: str, page: int, num_kv_heads: int | None) -> None:
    """num_kv_heads: of a pool with scales per token."""
    shape, num_pages, T = jax.ShapeDtypeStruct, 65_536 // page, 256
    pages = shape((2, num_pages, page, 2048), jnp.dtype(dtype))
    rows = shape((T, 2048), jnp.float32 if dtype == "float32" else jnp.bfloat16)
    pool_scales = scales = None
    if num_kv_heads is not None:
        dims = kv_orders_tpu.token_scales_shape(2, num_pages, page, num_kv_heads)
        pool_scales, scales = shape(dims, jnp.float32), shape((T, 2 * num_kv_heads), jnp.float32)
    args = (pages, pool_scales, shape((), jnp.int32), rows, scales, shape((T,), jnp.int32), shape((T,), jnp.int32))
    specs = jax.tree.map(lambda _: P(), args)
    compiled = compile_on(mesh_of(chip), write, specs, P(), *args, donate=(0, 1))
    memory = compiled.memory_analysis()
    pool_bytes = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in (pages, pool_scales) if leaf is not None)
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 2**24
