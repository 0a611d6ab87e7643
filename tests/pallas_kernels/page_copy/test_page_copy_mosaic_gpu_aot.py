"""Page copy compiled for a Hopper chip that is not here: in place, with few registers and no spills."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.absent_devices import why_unavailable
from pallas_kernels.inspection import nvidia
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.page_copy import mosaic_gpu
from pallas_kernels.page_copy.api import copy_pages

WHY_NOT = why_unavailable("h100")


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
