"""Quantization of keys and values: bounds, saturation, no subnormal numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write.quantize import largest, quantize, token_scales

# Half a step: of 127 for int8, of 3 and 2 explicit bits for the floats; relative to the peak of a token and head.
HALF_STEP = {"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}


@pytest.mark.parametrize("dtype", HALF_STEP)
def test_token_scales_bound_the_error(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((50, 3, 64)).astype(np.float32) * 1000
    scales = token_scales(jnp.asarray(x), dtype)
    back = np.asarray(quantize(jnp.asarray(x), scales[..., None], dtype), np.float64) * np.asarray(scales)[..., None]
    peak = np.abs(x).max(-1, keepdims=True)
    limit = peak if dtype == "int8" else np.maximum(np.abs(x), peak * 2.0**-13)
    assert (np.abs(back - x) <= HALF_STEP[dtype] * limit * 1.001).all()


@pytest.mark.parametrize("dtype", HALF_STEP)
def test_outliers_saturate(dtype: str) -> None:
    x = jnp.full((1, 2, 4), 600.0) * jnp.array([1.0, -1.0])[None, :, None] * 1000
    stored = np.asarray(quantize(x, jnp.ones((2, 1)), dtype), np.float64)
    assert (np.abs(stored) == largest(dtype)).all()
    assert (np.sign(stored) == np.sign(np.asarray(x))).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_no_subnormal_number_is_stored(dtype: str) -> None:
    smallest = float(jnp.finfo(dtype).smallest_normal)
    x = jnp.linspace(-2 * smallest, 2 * smallest, 101).reshape(1, 1, 101)
    stored = np.asarray(quantize(x, jnp.ones((1, 1)), dtype), np.float64)
    assert ((stored == 0) | (np.abs(stored) >= smallest)).all()
    assert np.abs(stored - np.asarray(x, np.float64)).max() <= smallest / 2 * 1.001


def test_zeros_keep_a_finite_scale() -> None:
    zeros = jnp.zeros((2, 1, 4))
    assert (token_scales(zeros, "int8") == 1).all()
    assert (quantize(zeros, token_scales(zeros, "int8")[..., None], "int8") == 0).all()


@pytest.mark.parametrize("dtype", HALF_STEP)
@pytest.mark.parametrize("peak", [1e-30, 1e-34, 1e-36, 1e-38, 1e-40])
def test_the_smallest_rows_stay_finite(dtype: str, peak: float) -> None:
    """A scale that hardware reads as zero would make the row NaN, and with it its sequence."""
    x = jnp.array([[[peak, 0.0, -peak / 2]]], jnp.float32)
    scales = jax.jit(token_scales, static_argnums=1)(x, dtype)
    stored = jax.jit(quantize, static_argnums=2)(x, scales[..., None], dtype)
    back = np.asarray(stored, np.float64) * np.asarray(scales, np.float64)[..., None]
    assert np.abs(back - np.asarray(x, np.float64)).max() <= max(peak, 1e-35)


@pytest.mark.parametrize("shape", [(1, 1, 64), (4096, 2, 64), (8, 1, 2048)])
def test_nan_is_not_lost_in_the_peak_of_a_row(shape: tuple[int, int, int]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[-1, 0, 7], x[0, -1, 9] = np.nan, -np.inf if x.size > 64 else np.nan
    scales = np.asarray(jax.jit(token_scales, static_argnums=1)(x, "int8"))
    finite = np.isfinite(x).all(axis=-1)
    np.testing.assert_array_equal(np.isfinite(scales), finite)
    assert np.isnan(scales[-1, 0])
