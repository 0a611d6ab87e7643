"""Page copy on TPU: whole pages in every layer, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.tpu_ahead_of_time import compile_on, mesh_of, needs_libtpu
from fixtures.tpu_interpreter import watching
from jax.sharding import PartitionSpec as P

from pallas_kernels.page_copy.mosaic_tpu import copy_pages


@pytest.mark.interpret
@pytest.mark.parametrize("dma", ["on_wait", "eager"])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_copies_the_first_pairs(count: int, dma: str) -> None:
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((3, 24, 16, 128)).astype(np.float32)
    ids = rng.permutation(24).astype(np.int32)
    sources, targets = ids[:9], ids[9:18]
    expected = pool.copy()
    expected[:, targets[:count]] = pool[:, sources[:count]]
    got = jax.jit(copy_pages, static_argnames="interpret")(
        pool, jnp.asarray(sources), jnp.asarray(targets), jnp.int32(count), interpret=watching(dma)
    )
    np.testing.assert_array_equal(np.asarray(got), expected)


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_compiles_in_place(chip: str, dtype: str) -> None:
    shape = jax.ShapeDtypeStruct
    pool = shape((2, 4096, 16, 2048), jnp.dtype(dtype))
    args = (pool, shape((8,), jnp.int32), shape((8,), jnp.int32), shape((), jnp.int32))
    compiled = compile_on(mesh_of(chip), copy_pages, (P(), P(), P(), P()), P(), *args, donate=(0,))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= np.prod(pool.shape) * pool.dtype.itemsize
    assert memory.temp_size_in_bytes < 2**20
