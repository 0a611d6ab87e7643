"""A loop over layers that writes keys and values and attends, compiled: the donated pool and its scales stay where they are."""

import jax
import jax.numpy as jnp
import pytest
from fixtures.tpu_ahead_of_time import compile_on, mesh_of, needs_libtpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention

pytestmark = [pytest.mark.aot, needs_libtpu, pytest.mark.timeout(300)]

LAYERS, SEQS, CONTEXT, TOKENS, D = 8, 64, 2048, 64, 128


@pytest.mark.parametrize(
    ("chip", "dtype", "K", "page"),
    [
        ("v5e", "int8", 8, 16),
        ("v6e", "float8_e4m3fn", 7, 128),  # 14 rows of scales
        ("v5e", "float8_e5m2", 3, 64),  # 3 rows
        ("v5p", "int8", 1, 16),  # a quarter of a row
        ("v4", "bfloat16", 8, 32),
    ],
)
def test_pool_and_scales_stay_in_place(chip: str, dtype: str, K: int, page: int) -> None:
    layout = KVLayout(LAYERS, K, D, page, dtype, "token_major", "none" if dtype == "bfloat16" else "token")
    num_pages = SEQS * CONTEXT // page
    shape = jax.ShapeDtypeStruct
    scales_shape = layout.scales_shape(num_pages)
    kv = KVPages(
        shape(layout.pages_shape(num_pages), jnp.dtype(dtype)),
        None if scales_shape is None else shape(scales_shape, jnp.float32),
    )
    new = shape((LAYERS, TOKENS, 2 * K, D), jnp.bfloat16)
    q = shape((TOKENS, 2 * K, D), jnp.bfloat16)
    ints = [
        shape(dims, jnp.int32) for dims in ((TOKENS,), (TOKENS,), (SEQS, CONTEXT // page), (SEQS + 1,), (SEQS,), ())
    ]

    def step(q, kv, new, pages, offsets, *tables):
        def layer(carry, xs):
            x, kv = carry
            index, rows = xs
            kv = write_kv(kv, index, rows[:, :K], rows[:, K:], pages, offsets, layout=layout, backend="mosaic_tpu")
            out = ragged_paged_attention(x, kv, index, *tables, layout=layout, scale=0.1, backend="mosaic_tpu")
            return (out, kv), None

        (x, kv), _ = jax.lax.scan(layer, (q, kv), (jnp.arange(LAYERS), new))
        return x, kv

    specs = (P(), jax.tree.map(lambda _: P(), kv), P(), *[P() for _ in ints])
    compiled = compile_on(mesh_of(chip), step, specs, (P(), specs[1]), q, kv, new, *ints, donate=(1,))
    memory, pool_bytes = compiled.memory_analysis(), layout.bytes_per_page * num_pages
    assert memory.alias_size_in_bytes >= pool_bytes
    scale_bytes = 0 if kv.scales is None else kv.scales.size * 4
    assert memory.temp_size_in_bytes < max(scale_bytes, 2**24) // 2, "no copy of pages or scales"
    for array in jax.tree.leaves(kv):
        dims = ",".join(map(str, array.shape))
        assert not [line for line in compiled.as_text().splitlines() if f"[{dims}]" in line and " copy(" in line]
