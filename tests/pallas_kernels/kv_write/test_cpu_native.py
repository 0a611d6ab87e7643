"""KV write in native code: rows outside of the pool, that the pool is never copied, and what attention loses with int8."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.dense_attention import dense_attention
from jax import Array

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention

LAYERS, K, D, PAGE, PAGES = 3, 2, 64, 8, 6


def draw(tokens: int, dtype: str, seed: int = 0) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(seed)
    keys, values = (jnp.asarray(rng.normal(size=(tokens, K, D)), dtype) for _ in range(2))
    slots = rng.permutation((PAGES - 1) * PAGE)[:tokens]
    return keys, values, jnp.asarray(slots // PAGE, jnp.int32), jnp.asarray(slots % PAGE, jnp.int32)


def layout_of(dtype: str, layers: int = LAYERS) -> KVLayout:
    return KVLayout(layers, K, D, PAGE, dtype, scales="token" if dtype == "int8" else "none")


def test_rows_outside_of_the_pool_are_dropped() -> None:
    layout = layout_of("float32")
    kv = KVPages(jnp.full(layout.pages_shape(PAGES), 7.0))
    keys, values, _, _ = draw(6, "float32")
    pages = jnp.asarray([-1, PAGES, 2**31 - 1, 1, 1, 1], jnp.int32)
    offsets = jnp.asarray([0, 0, 0, 3, -1, PAGE], jnp.int32)
    out = write_kv(kv, jnp.int32(0), keys, values, pages, offsets, layout=layout, backend="cpu_native")
    assert np.sum(np.asarray(out.pages) != 7) == 2 * K * D


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_pool_is_written_in_place(dtype: str) -> None:
    """A scan over layers that writes and attends, as the step does, neither copies the pool nor needs a second one."""
    layout = layout_of(dtype, 8)
    shape = layout.pages_shape(2000)
    kv = KVPages(jnp.zeros(shape, dtype), jnp.zeros(shape[:-1], jnp.float32) if dtype == "int8" else None)
    keys, values, pages, offsets = draw(4, "bfloat16")

    def step(kv: KVPages, keys: Array, values: Array) -> tuple[KVPages, Array]:
        def layer(carry: tuple[KVPages, Array], index: Array) -> tuple[tuple[KVPages, Array], None]:
            kv, hidden = carry
            kv = write_kv(kv, index, keys + hidden, values, pages, offsets, layout=layout, backend="cpu_native")
            hidden = ragged_paged_attention(
                hidden,
                kv,
                index,
                jnp.zeros((4, 4), jnp.int32),
                jnp.arange(5, dtype=jnp.int32),
                jnp.full((4,), 9, jnp.int32),
                jnp.int32(4),
                layout=layout,
                scale=0.125,
                backend="cpu_native",
            )
            return (kv, hidden), None

        return jax.lax.scan(layer, (kv, keys), jnp.arange(8))[0]

    compiled = jax.jit(step, donate_argnums=0).lower(kv, keys, values).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= kv.pages.nbytes
    assert memory.temp_size_in_bytes < kv.pages.nbytes // 20
    text, pool_shape = compiled.as_text(), "[" + ",".join(map(str, shape)) + "]"
    assert pool_shape in text
    assert not re.search(re.escape(pool_shape) + r"\S* (copy|fusion)\(", text)
    before = kv.pages.unsafe_buffer_pointer()
    out, _ = compiled(kv, keys, values)
    assert out.pages.unsafe_buffer_pointer() == before


def test_what_int8_loses_is_bounded() -> None:
    """Written into an int8 pool and attended to, against float64 attention over the exact keys and values.

    A key is off by at most half a step, absmax / 254, in each dim: a score by delta = scale * |q|_1 * absmax / 254. Weights then
    change by a factor within exp(+-2 delta), a result by (exp(2 delta) - 1) * max|v|, and by half a step of the values.
    """
    tokens, heads = 40, 4
    layout = layout_of("int8", 1)
    shape = layout.pages_shape(PAGES)
    keys, values, _, _ = draw(tokens, "float32")
    slots = jnp.arange(tokens)
    kv = KVPages(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], jnp.float32))
    kv = write_kv(kv, jnp.int32(0), keys, values, slots // PAGE, slots % PAGE, layout=layout, backend="cpu_native")
    q = jax.random.normal(jax.random.key(0), (tokens, heads, D), jnp.float32)
    out = ragged_paged_attention(
        q,
        kv,
        jnp.int32(0),
        jnp.arange(PAGES, dtype=jnp.int32)[None],
        jnp.asarray([0, tokens], jnp.int32),
        jnp.asarray([tokens], jnp.int32),
        jnp.int32(1),
        layout=layout,
        scale=D**-0.5,
        backend="cpu_native",
    )
    q64, k64, v64 = (np.asarray(array, np.float64) for array in (q, keys, values))
    exact = dense_attention(q64, k64, v64, scale=D**-0.5)
    key_step, largest = np.abs(k64).max() / 254, np.abs(v64).max()
    delta = D**-0.5 * np.abs(q64).sum(axis=-1, keepdims=True) * key_step
    bound = (np.exp(2 * delta) - 1) * largest + largest / 254 + 1e-5
    error = np.abs(np.asarray(out, np.float64) - exact)
    assert np.all(error <= bound)
    assert np.linalg.norm(error) / np.linalg.norm(exact) < 2e-2
