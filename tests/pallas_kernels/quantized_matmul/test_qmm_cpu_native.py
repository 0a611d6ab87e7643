"""The native int8 matmul against float64 and against itself: shapes, rotation, padding rows, batches; and what it refuses."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quantized_matmul_oracle import expect
from hypothesis import given, settings

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.rotation import rotate
from pallas_kernels.quantized_matmul.weights import quantize


def problem(T: int, out: int, width: int, dtype: Any = jnp.bfloat16, *, rotated: bool = False) -> tuple[Any, Any]:
    rng = np.random.default_rng(T * 1000 + out)
    x = jnp.asarray(rng.standard_normal((T, width)), dtype)
    return x, quantize(rng.standard_normal((out, width)).astype(np.float32), "int8", rotated=rotated)


@jax.jit
def native(x: Any, weight: Any, rows: Any = None) -> Any:
    return quantized_matmul(x, weight, rows=rows, backend="cpu_native")


@settings(max_examples=40)
@given(
    T=st.integers(1, 150),
    out=st.integers(1, 120),
    width=st.integers(1, 300),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float32]),
    rotated=st.booleans(),
)
def test_odd_shapes(T: int, out: int, width: int, dtype: Any, rotated: bool) -> None:
    x, weight = problem(T, out, width, dtype, rotated=rotated)
    got = native(x, weight)
    assert got.dtype == dtype
    # The native code rotates in an order of its own: a step more or less where a value is half way between two.
    turned = rotate(x) if rotated else x
    expected = expect(turned, weight, dtype)
    step = np.abs(np.asarray(turned, np.float64)).max(axis=1, keepdims=True) / 127
    error = np.abs(np.asarray(got, np.float64) - expected.product)
    assert (error <= expected.bound + (1e-5 * step * np.abs(weight.values).sum(axis=1) * weight.scales)).all()


def test_outliers_zero_rows_and_rows_that_are_not_finite() -> None:
    x, weight = problem(9, 40, 256, jnp.float32)
    x = x.at[2, 7].set(3e4).at[3].set(0).at[4].mul(1e-30).at[5].mul(1e30)
    got = native(x, weight)
    expect(x, weight, got.dtype).check(got)
    assert not got[3].any()
    broken = np.asarray(native(x.at[1, 3].set(jnp.nan).at[2, 9].set(jnp.inf), weight))
    assert not np.isfinite(broken[1:3]).any()
    np.testing.assert_array_equal(broken[3:], got[3:])


@pytest.mark.parametrize("rotated", [False, True])
def test_a_row_is_the_same_in_every_batch_and_padding_is_not_computed(rotated: bool) -> None:
    x, weight = problem(133, 100, 192, rotated=rotated)
    whole = np.asarray(native(x, weight))
    for rows in (1, 3, 8, 9, 64, 65, 132):
        np.testing.assert_array_equal(np.asarray(native(x[:rows], weight)), whole[:rows])
        some = np.asarray(native(x, weight, jnp.int32(rows)))
        np.testing.assert_array_equal(some[:rows], whole[:rows])
        assert not some[rows:].any()
    assert not np.asarray(native(x, weight, jnp.int32(-3))).any()
    np.testing.assert_array_equal(np.asarray(native(x, weight, jnp.int32(1000))), whole)


def test_a_layer_of_a_stack() -> None:
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((5, 64)), jnp.float32)
    stack = quantize(rng.standard_normal((3, 50, 64)).astype(np.float32), "int8")
    for layer in range(3):
        one = jax.tree.map(lambda array, layer=layer: array[layer], stack)
        got = quantized_matmul(x, stack, layer=jnp.int32(layer), backend="cpu_native")
        np.testing.assert_array_equal(got, native(x, one))


@pytest.mark.parametrize("kind", ["fp8_e4m3", "int4"])
def test_other_kinds_are_refused(kind: Any) -> None:
    weight = quantize(np.ones((8, 64), np.float32), kind, group=32)
    with pytest.raises(ValueError, match=f"'cpu_native' has int8 weights only, not {kind}"):
        quantized_matmul(jnp.ones((2, 64)), weight, backend="cpu_native")


def test_another_result_type_is_refused() -> None:
    x, weight = problem(2, 8, 64)
    with pytest.raises(ValueError, match="returns bfloat16 or float32, not float16"):
        quantized_matmul(x, weight, out_dtype=jnp.float16, backend="cpu_native")


def test_a_packed_weight_is_refused_by_other_backends() -> None:
    weight = quantize(np.ones((8, 64), np.float32), "int8")
    with pytest.raises(ValueError, match="packed weight can be read by matmul backend 'cpu_native' only"):
        quantized_matmul(jnp.ones((2, 64)), weight, packed=True)
