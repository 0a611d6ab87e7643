"""Matmul with float weights, XLA's and the native one: against float64, in every batch, and what is refused."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels.dense_matmul.api import BACKENDS, dense_matmul

multiply = jax.jit(dense_matmul, static_argnames=("backend", "out_dtype"))
BOUND = {"float32": 1e-5, "bfloat16": 2.0**-8}


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25)
@given(
    T=st.integers(1, 150),
    out=st.integers(1, 120),
    pairs=st.integers(1, 150),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    out_dtype=st.sampled_from([None, "float32"]),
)
def test_odd_shapes(backend: Any, T: int, out: int, pairs: int, dtype: str, out_dtype: str | None) -> None:
    rng = np.random.default_rng(T)
    x = jnp.asarray(rng.standard_normal((T, 2 * pairs)), dtype)
    stack = jnp.asarray(rng.standard_normal((2, out, 2 * pairs)), dtype)
    got = multiply(x, stack, layer=jnp.int32(1), out_dtype=out_dtype, backend=backend)
    assert got.dtype == (out_dtype or dtype)
    wanted = np.asarray(x, np.float64) @ np.asarray(stack[1], np.float64).T
    error = np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < (1e-5 if out_dtype else BOUND[dtype])


@pytest.mark.parametrize("dtype", BOUND)
def test_a_row_is_the_same_in_every_batch_and_padding_is_not_computed(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((133, 192)), dtype)
    weight = jnp.asarray(rng.standard_normal((100, 192)), dtype)
    whole = np.asarray(multiply(x, weight, backend="cpu_native"))
    for rows in (1, 3, 8, 9, 64, 65, 132):
        np.testing.assert_array_equal(np.asarray(multiply(x[:rows], weight, backend="cpu_native")), whole[:rows])
        some = np.asarray(multiply(x, weight, rows=jnp.int32(rows), backend="cpu_native"))
        np.testing.assert_array_equal(some[:rows], whole[:rows])
        assert not some[rows:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("T", "out"), [(0, 5), (3, 0)])
def test_nothing_by_something(T: int, out: int, backend: Any) -> None:
    assert multiply(jnp.ones((T, 8)), jnp.ones((out, 8)), backend=backend).shape == (T, out)


@pytest.mark.parametrize(
    ("x", "weight", "options", "message"),
    [
        (jnp.ones((2, 4)), jnp.ones((3, 5)), {}, "do not fit a weight of shape"),
        (jnp.ones((2, 4)), jnp.ones((1, 3, 4)), {}, "do not fit a weight of shape"),
        (jnp.ones((2, 4)), jnp.ones((3, 4), jnp.bfloat16), {}, "not float32 by bfloat16"),
        (jnp.ones((2, 4), jnp.float16), jnp.ones((3, 4), jnp.float16), {}, "not float16 by float16"),
        (jnp.ones((2, 5), jnp.bfloat16), jnp.ones((3, 5), jnp.bfloat16), {}, "so 5 inputs are not possible"),
        (jnp.ones((2, 4)), jnp.ones((3, 4)), {"backend": "cuda"}, "'cuda' is unknown"),
        (jnp.ones((2, 4)), jnp.ones((3, 4)), {"backend": "reference", "packed": True}, "'cpu_native' only"),
    ],
)
def test_refusals(x: Any, weight: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dense_matmul(x, weight, **{"backend": "cpu_native", **options})
