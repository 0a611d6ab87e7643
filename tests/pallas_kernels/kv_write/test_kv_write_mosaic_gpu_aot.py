"""KV write compiled for a Hopper chip that is not here: in place, with few registers and no spills."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.absent_devices import why_unavailable
from pallas_kernels.inspection import nvidia
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write import mosaic_gpu
from pallas_kernels.kv_write.api import write_kv

WHY_NOT = why_unavailable("h100")


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
