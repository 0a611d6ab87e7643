"""The quantizer against its definition, the bytes it keeps and the memory it takes."""

import tracemalloc
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixtures.quantized_matmul_oracle import LARGEST, stored
from hypothesis import given
from hypothesis.extra import numpy as npst
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantized_matmul.weights import (
    KINDS,
    QuantizedWeight,
    dequantize,
    lookup,
    partition_specs,
    quantize,
)

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3"])
def test_symmetric_kinds_are_within_half_a_step(kind: Any, dtype: Any) -> None:
    weight = normal(5, 70, dtype=dtype)
    weight[1] *= 1000  # an outlying channel does not touch the others
    weight[2] = 0
    weight[3, 5] = 300
    quantized = quantize(weight, kind)
    exact = weight.astype(np.float64)
    top = np.abs(exact).max(axis=1, keepdims=True)
    np.testing.assert_array_equal(quantized.scales[[0, 1, 3]], (top[[0, 1, 3], 0].astype(np.float32) / LARGEST[kind]))
    if kind == "int8":
        half_step = top / 127 * (0.5 + 1e-4)
    else:
        half_step = np.maximum(np.abs(exact) * 2.0**-4, top / 448 * 2.0**-10) * (1 + 1e-6)
    assert (np.abs(stored(quantized) - exact) <= half_step).all()
    assert np.abs(np.asarray(quantized.values[[0, 1, 3]], np.float32)).max(axis=1).tolist() == [LARGEST[kind]] * 3
    assert not np.asarray(quantized.values[2], np.float32).any()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_groups_are_within_one_step(group: int) -> None:
    weight = normal(3, 256) + np.linspace(-2, 2, 256, dtype=np.float32)
    weight[1, :128] = 0
    quantized = quantize(weight, "int4", group=group)
    grouped = weight.reshape(3, -1, group).astype(np.float64)
    steps = (grouped.max(axis=2, initial=0) - grouped.min(axis=2, initial=0)) / 15
    # Half a step for the value, half for the zero point.
    error = np.abs(stored(quantized).reshape(grouped.shape) - grouped)
    assert (error <= steps[..., None] * (1 + 1e-4)).all()
    assert not stored(quantized)[1, :128].any()
    assert quantized.group == group


@given(
    npst.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.just(64)),
        elements=st.floats(-3.4028234663852886e38, 3.4028234663852886e38, width=32),
    ),
    st.sampled_from(KINDS),
)
def test_any_finite_weight_gives_finite_numbers(weight: np.ndarray[Any, Any], kind: Any) -> None:
    with np.errstate(all="ignore"):
        quantized = quantize(weight, kind, group=64)
    assert np.isfinite(stored(quantized)).all()
    assert (np.asarray(quantized.scales) > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_stacks_are_quantized_like_their_parts(kind: Any) -> None:
    stack = normal(3, 7, 128)
    whole = quantize(stack, kind)
    assert whole.shape == stack.shape
    for i, part in enumerate(stack):
        for mine, alone in zip(jax.tree.leaves(whole), jax.tree.leaves(quantize(part, kind)), strict=True):
            np.testing.assert_array_equal(mine[i], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_and_lookup_give_what_the_bytes_stand_for(kind: Any) -> None:
    quantized = quantize(normal(3, 40, 128), kind)
    on_device = jax.tree.map(jnp.asarray, quantized)
    np.testing.assert_allclose(dequantize(on_device), stored(quantized), rtol=2.0**-23)
    table = jax.tree.map(lambda array: array[1], on_device)
    rows = jnp.array([5, 0, 39, 5])
    got = jax.jit(lookup, static_argnums=2)(table, rows, jnp.bfloat16)
    np.testing.assert_array_equal(got, dequantize(table, jnp.bfloat16)[rows])


def test_bytes_per_element() -> None:
    weight = normal(64, 1024, dtype=ml_dtypes.bfloat16)
    sizes = {kind: quantize(weight, kind) for kind in KINDS}
    for kind, per_element in (("int8", 1), ("fp8_e4m3", 1), ("int4", 0.5)):
        assert sizes[kind].values.nbytes == weight.size * per_element
    assert sizes["int8"].nbytes == sizes["fp8_e4m3"].nbytes == weight.size + 64 * 4
    assert sizes["int4"].nbytes == weight.size / 2 + 64 * (1024 // 128) * 5


@pytest.mark.parametrize("kind", KINDS)
def test_no_float32_copy_of_the_weight(kind: Any) -> None:
    weight = np.ones((4096, 4096), ml_dtypes.bfloat16)
    tracemalloc.start()
    try:
        result = quantize(weight, kind)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < result.nbytes + 32 * 2**20 < weight.size * 4


def test_partition_specs_follow_the_arrays() -> None:
    assert partition_specs("int8", None, "tensor", None) == QuantizedWeight(
        P(None, "tensor", None), P(None, "tensor"), kind="int8"
    )
    assert partition_specs("fp8_e4m3", None, None, "tensor") == QuantizedWeight(
        P(None, None, "tensor"), P(None, None), kind="fp8_e4m3"
    )
    grouped = P(None, "tensor", None)
    assert partition_specs("int4", None, None, "tensor") == QuantizedWeight(
        P(None, None, "tensor"), grouped, grouped, kind="int4"
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite(bad: float) -> None:
    weight = normal(2, 4, 128)
    weight[1, 2, 3] = bad
    with pytest.raises(ValueError, match=r"row 1, 2 of a weight of shape \(2, 4, 128\) holds NaN or infinity"):
        quantize(weight, "int8")


def test_what_cannot_be_quantized() -> None:
    with pytest.raises(ValueError, match="'int3' is unknown: it must be one of int8, fp8_e4m3, int4"):
        quantize(normal(2, 2), "int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be"):
        quantize(normal(2), "int8")
    with pytest.raises(ValueError, match="group of 16 is not supported: it must be one of 32, 64, 128"):
        quantize(normal(2, 64), "int4", group=16)
    with pytest.raises(ValueError, match="96 inputs cannot be cut into int4 groups of 64"):
        quantize(normal(2, 96), "int4", group=64)
