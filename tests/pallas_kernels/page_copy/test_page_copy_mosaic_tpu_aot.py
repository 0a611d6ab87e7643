"""Page copy compiled for TPUs that are not here: in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.tpu_ahead_of_time import compile_on, mesh_of, needs_libtpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.page_copy.mosaic_tpu import copy_pages


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
