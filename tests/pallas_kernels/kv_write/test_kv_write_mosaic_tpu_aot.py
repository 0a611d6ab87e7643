"""KV write compiled for TPUs that are not here: in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.tpu_ahead_of_time import compile_on, mesh_of, needs_libtpu
from jax.sharding import PartitionSpec as P

from pallas_kernels import kv_orders_tpu
from pallas_kernels.kv_write.mosaic_tpu import write


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
