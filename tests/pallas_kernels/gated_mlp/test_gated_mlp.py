"""The gated MLP, XLA's and the native one: against float64, in every batch, packed, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_matmul.api import BACKENDS
from pallas_kernels.gated_mlp.api import gated_mlp
from pallas_kernels.packed_weight.weight import pack
from pallas_kernels.quantized_matmul.weights import dequantize, quantize

mlp = jax.jit(gated_mlp, static_argnames="backend")
SHAPES = [(1, 64, 96), (9, 70, 132), (70, 96, 100)]


def problem(T: int, E: int, F: int, dtype: str, *, int8: bool) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(F)
    x = jnp.asarray(rng.standard_normal((T, E)), dtype)
    gate_up = rng.standard_normal((2, 2, F, E)).astype(np.float32) * E**-0.5
    down = rng.standard_normal((2, E, F)).astype(np.float32) * F**-0.5
    if int8:
        return x, *(jax.tree.map(jnp.asarray, quantize(weight, "int8", rotated=True)) for weight in (gate_up, down))
    return x, jnp.asarray(gate_up, dtype), jnp.asarray(down, dtype)


def wanted(x: Any, gate_up: Any, down: Any, layer: int) -> np.ndarray[Any, Any]:
    gate, up = np.asarray(gate_up[layer], np.float64)
    rows = np.asarray(x, np.float64)
    gated = rows @ gate.T
    return gated / (1 + np.exp(-gated)) * (rows @ up.T) @ np.asarray(down[layer], np.float64).T


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_numbers(shape: tuple[int, int, int], dtype: str, int8: bool, backend: Any) -> None:
    x, gate_up, down = problem(*shape, dtype, int8=int8)
    got = mlp(x, gate_up, down, jnp.int32(1), backend=backend)
    assert got.dtype == x.dtype
    plain = (dequantize(gate_up), dequantize(down)) if int8 else (gate_up, down)
    right = wanted(x, *plain, 1)
    error = np.linalg.norm(np.asarray(got, np.float64) - right) / np.linalg.norm(right)
    # int8: three roundings of activations to a step of 1/127 of a row's largest, about three standard deviations.
    assert error < (0.03 if int8 else {"float32": 1e-5, "bfloat16": 1e-2}[dtype])


def test_a_gate_far_from_zero_is_the_identity_or_nothing() -> None:
    gate_up = jnp.stack([jnp.full((1, 1), 1.0), jnp.full((1, 1), 1.0)])[None]
    x = jnp.array([[-1e30], [-88.5], [0.0], [1e4]])
    got = mlp(x, gate_up, jnp.ones((1, 1, 1)), jnp.int32(0), backend="cpu_native")
    np.testing.assert_allclose(np.asarray(got)[:, 0], [0.0, 0.0, 0.0, 1e8], atol=1e-30)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_batches_and_packed_weights_agree_to_the_bit(dtype: str, int8: bool) -> None:
    x, gate_up, down = problem(70, 96, 100, dtype, int8=int8)
    whole = np.asarray(mlp(x, gate_up, down, jnp.int32(1), backend="cpu_native"))
    for rows in (1, 8, 33):
        alone = mlp(x[:rows], gate_up, down, jnp.int32(1), backend="cpu_native")
        np.testing.assert_array_equal(np.asarray(alone), whole[:rows])
        some = np.asarray(mlp(x, gate_up, down, jnp.int32(1), rows=jnp.int32(rows), backend="cpu_native"))
        np.testing.assert_array_equal(some[:rows], whole[:rows])
        assert not some[rows:].any()
    packed = (pack(gate_up, gate_up.shape), pack(down, down.shape))
    np.testing.assert_array_equal(np.asarray(mlp(x, *packed, jnp.int32(1), backend="cpu_native")), whole)


def test_refusals() -> None:
    x, gate_up, down = problem(2, 64, 96, "float32", int8=False)
    _, int8_gate_up, int8_down = problem(2, 64, 96, "float32", int8=True)
    layer = jnp.int32(0)
    with pytest.raises(ValueError, match="do not fit each other"):
        gated_mlp(x, gate_up, down[:, :, :-1], layer, backend="cpu_native")
    with pytest.raises(ValueError, match=r"gate_up of shape \(1, 2, 0, 4\) is empty"):
        gated_mlp(jnp.ones((2, 4)), jnp.ones((1, 2, 0, 4)), jnp.ones((1, 4, 0)), layer, backend="cpu_native")
    int4 = [quantize(np.ones(shape, np.float32), "int4", group=32) for shape in ((1, 2, 96, 64), (1, 64, 96))]
    with pytest.raises(ValueError, match="no int4 weights"):
        gated_mlp(x, *int4, layer, backend="reference")
    with pytest.raises(ValueError, match="both be quantized, or neither"):
        gated_mlp(x, gate_up, int8_down, layer, backend="cpu_native")
    with pytest.raises(ValueError, match="dtype int32 are not supported"):
        gated_mlp(x.astype(jnp.int32), gate_up, down, layer, backend="reference")
    with pytest.raises(ValueError, match="'mosaic' is unknown"):
        gated_mlp(x, gate_up, down, layer, backend="mosaic")  # type: ignore[arg-type]
    packed = pack(int8_down, int8_down.shape)
    with pytest.raises(ValueError, match="both be packed, or neither"):
        gated_mlp(x, int8_gate_up, packed, layer, backend="cpu_native")
    with pytest.raises(ValueError, match="'cpu_native' only"):
        gated_mlp(x, pack(int8_gate_up, int8_gate_up.shape), packed, layer, backend="reference")
