"""KV write in native code: values, scales, untouched pages, and that the pool is never copied."""

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


def make_pool(dtype: str, fill: float) -> KVPages:
    layout = layout_of(dtype)
    shape = layout.pages_shape(PAGES)
    return KVPages(jnp.full(shape, fill, dtype), jnp.full(shape[:-1], fill, jnp.float32) if dtype == "int8" else None)


@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
@pytest.mark.parametrize("new", ["float32", "bfloat16"])
def test_writes_what_the_reference_writes(pool: str, new: str) -> None:
    kv = make_pool(pool, np.nan)
    rows = draw(13, new)
    expected, actual = (
        write_kv(kv, jnp.int32(1), *rows, layout=layout_of(pool), backend=backend).pages
        for backend in ("reference", "cpu_native")
    )
    as_bits = np.uint32 if pool == "float32" else np.uint16
    np.testing.assert_array_equal(np.asarray(actual).view(as_bits), np.asarray(expected).view(as_bits))


@pytest.mark.parametrize("new", ["float32", "bfloat16"])
def test_int8_rows_get_their_own_scale(new: str) -> None:
    kv = make_pool("int8", 77)
    keys, values, pages, offsets = draw(13, new)
    keys = keys.at[2].set(0.0)
    out = write_kv(kv, jnp.int32(1), keys, values, pages, offsets, layout=layout_of("int8"), backend="cpu_native")
    assert out.scales is not None
    rows = np.stack([np.asarray(keys, np.float32), np.asarray(values, np.float32)], axis=1)
    scales = np.asarray(out.scales)[1, pages, :, :, offsets]
    stored = np.asarray(out.pages)[1, pages, :, :, offsets].astype(np.float32)
    np.testing.assert_allclose(scales, np.abs(rows).max(axis=-1) / 127, rtol=1e-6)
    assert np.all(np.abs(stored * scales[..., None] - rows) <= scales[..., None] * 0.5001)
    assert np.array_equal(np.abs(stored).max(axis=-1) == 127, scales > 0)

    untouched = np.ones(out.scales.shape, bool)
    untouched[1, pages, :, :, offsets] = False
    assert np.all(np.asarray(out.pages)[untouched] == 77)
    assert np.all(np.asarray(out.scales)[untouched] == 77)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_int8_does_not_hide_what_is_not_finite(bad: float) -> None:
    keys, values, pages, offsets = draw(3, "float32")
    out = write_kv(
        make_pool("int8", 0),
        jnp.int32(0),
        keys.at[1, 0, 5].set(bad),
        values,
        pages,
        offsets,
        layout=layout_of("int8"),
        backend="cpu_native",
    )
    assert out.scales is not None
    back = np.asarray(out.pages, np.float32) * np.asarray(out.scales)[..., None]
    finite = np.isfinite(back[0, pages, 0, :, offsets]).all(axis=-1)
    assert finite.tolist() == [[True, True], [False, True], [True, True]]


def test_rows_outside_of_the_pool_are_dropped() -> None:
    kv = make_pool("float32", 7)
    keys, values, _, offsets = draw(4, "float32")
    out = write_kv(
        kv,
        jnp.int32(0),
        keys,
        values,
        jnp.asarray([-1, PAGES, 2**31 - 1, 1], jnp.int32),
        offsets,
        layout=layout_of("float32"),
        backend="cpu_native",
    )
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
