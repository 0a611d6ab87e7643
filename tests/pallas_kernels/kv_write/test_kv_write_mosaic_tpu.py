"""KV write on TPU: exact, bit for bit, and nothing else in the pool changes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixtures.tpu_ahead_of_time import compile_on, mesh_of, needs_libtpu
from fixtures.tpu_interpreter import watching
from jax.sharding import PartitionSpec as P

from pallas_kernels.kv_write.mosaic_tpu import write_rows

LANES = 256


def _numbers(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = rng.standard_normal(shape) * (30 if kind.itemsize == 1 else 1)
    return np.round(x).astype(kind) if dtype == "int8" else x.astype(kind)


@pytest.mark.interpret
@pytest.mark.parametrize("dma", ["on_wait", "eager"])
@pytest.mark.parametrize(("dtype", "page"), [("bfloat16", 16), ("float32", 32), ("int8", 128), ("float8_e4m3fn", 64)])
def test_writes_exactly_the_rows(dtype: str, page: int, dma: str) -> None:
    rng = np.random.default_rng(3)
    L, num_pages = 2, 24
    pages = _numbers((L, num_pages, page, LANES), dtype, rng)
    if dtype != "int8":
        pages[0] = np.nan  # what is not addressed stays, NaN bits included
    free = list(rng.permutation(num_pages - 1))
    page_ids, offsets = [], []
    # (first position, tokens): decodes, a chunk over several tiles and pages, a chunk that starts inside a tile
    for position, tokens in [(5, 1), (0, 70), (15, 1), (16, 1), (9, 20), (31, 3), *[(k, 1) for k in range(10)]]:
        ids = [free.pop() for _ in range((position + tokens - 1) // page - position // page + 1)]
        for at in range(position, position + tokens):
            page_ids.append(ids[at // page - position // page])
            offsets.append(at % page)
    page_ids += [num_pages - 1] * 5
    offsets += [0, 0, 3, 1, 0]
    T = len(page_ids)
    stored = _numbers((T, LANES), dtype, rng)
    rows = stored if dtype == "float32" else stored.astype(ml_dtypes.bfloat16)
    expected = pages.copy()
    for t in range(T - 5):
        expected[1, page_ids[t], offsets[t]] = stored[t]
    got = jax.jit(write_rows, static_argnames=("trash_page", "interpret"))(
        pages, jnp.int32(1), rows, jnp.array(page_ids), jnp.array(offsets), trash_page=num_pages - 1,
        interpret=watching(dma),
    )  # fmt: skip
    assert np.asarray(got).tobytes() == expected.tobytes()


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_compiles_in_place(chip: str, dtype: str) -> None:
    shape = jax.ShapeDtypeStruct
    pool = shape((2, 4096, 16, 2048), jnp.dtype(dtype))
    rows = shape((256, 2048), jnp.float32 if dtype == "float32" else jnp.bfloat16)
    args = (pool, shape((), jnp.int32), rows, shape((256,), jnp.int32), shape((256,), jnp.int32))

    def call(pages, layer, rows, page_ids, offsets):
        return write_rows(pages, layer, rows, page_ids, offsets, trash_page=4095)

    compiled = compile_on(mesh_of(chip), call, (P(), P(), P(), P(), P()), P(), *args, donate=(0,))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= np.prod(pool.shape) * pool.dtype.itemsize
    assert memory.temp_size_in_bytes < 2**24
