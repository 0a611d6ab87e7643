"""Rotated weights: the same product, and outliers of activations that no longer drown the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.rotation import BLOCK, HADAMARD, rotate, rotate_weight
from pallas_kernels.quantized_matmul.weights import Kind, dequantize, lookup, quantize


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_the_matrix_is_its_own_inverse() -> None:
    np.testing.assert_array_equal(HADAMARD @ HADAMARD, np.eye(BLOCK))


@pytest.mark.parametrize("width", [16, 64, 96, 192])
def test_products_stay_as_they_are(width: int) -> None:
    x, weight = draw(5, width), draw(7, width, seed=1)
    product = np.asarray(rotate(jnp.asarray(x))) @ rotate_weight(weight).T
    np.testing.assert_allclose(product, x @ weight.T, atol=1e-4)
    np.testing.assert_allclose(rotate(jnp.asarray(rotate_weight(weight))), weight, atol=1e-5)


def test_outliers_cost_less() -> None:
    x, weight = draw(16, 256), draw(64, 256, seed=1)
    x[:, 7] *= 100
    weight[:, 7] = 0  # what the others give is all that counts
    expected = x @ weight.T

    def error(rotated: bool) -> float:
        out = quantized_matmul(jnp.asarray(x), quantize(weight, "int8", rotated=rotated))
        return float(np.linalg.norm(np.asarray(out) - expected) / np.linalg.norm(expected))

    assert error(True) < 0.5 * error(False)
    assert error(True) < 0.2


def test_rows_of_a_table_come_back_unrotated() -> None:
    table = draw(9, 80)
    small = jax.tree.map(jnp.asarray, quantize(table, "int8", rotated=True))
    rows = jnp.asarray([3, 0, 8])
    np.testing.assert_allclose(lookup(small, rows, jnp.float32), table[np.asarray(rows)], atol=0.05)
    np.testing.assert_allclose(dequantize(small), table, atol=0.05)


@pytest.mark.parametrize("kind", ["int4", "fp8_e4m3"])
def test_other_kinds_are_not_rotated(kind: Kind) -> None:
    with pytest.raises(ValueError, match=f"{kind} weights are not rotated"):
        quantize(draw(4, 128), kind, rotated=True)
