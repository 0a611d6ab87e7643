"""Packed weights: their bytes are the plain ones' in another order, and the matmul reads both alike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import matmul
from pallas_kernels.packed_weight.weight import can_pack, pack
from pallas_kernels.quantized_matmul.weights import quantize


def weight(kind: str, *shape: int) -> Any:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return (
        jax.tree.map(jnp.asarray, quantize(values, "int8", rotated=True))
        if kind == "int8"
        else jnp.asarray(values, kind)
    )


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(2, 48, 64), (1, 500, 68), (3, 7, 12)])
def test_a_packed_weight_multiplies_like_the_plain_one(kind: str, shape: tuple[int, ...]) -> None:
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    x = jnp.asarray(np.random.default_rng(2).standard_normal((11, shape[-1])), dtype)
    for layer in range(shape[0]):
        plain = matmul(x, weight(kind, *shape), jnp.int32(layer), backend="cpu_native")
        got = matmul(x, pack(weight(kind, *shape), shape), jnp.int32(layer), backend="cpu_native")
        np.testing.assert_array_equal(np.asarray(got), np.asarray(plain))


def test_only_the_order_of_the_bytes_changes_and_no_copy_is_made() -> None:
    content = np.sort(np.asarray(weight("bfloat16", 2, 500, 64)).view(np.uint16), axis=None)
    before = weight("bfloat16", 2, 500, 64) * 1  # in memory of the device's own, of which numpy has no view
    address = before.unsafe_buffer_pointer()
    packed = pack(before, (2, 500, 64))
    assert packed.shape == (2, 500, 64)
    assert isinstance(packed.plain, jax.Array)
    assert packed.plain.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.sort(np.asarray(packed.plain).view(np.uint16), axis=None), content)


def test_what_cannot_be_packed_is_refused_and_left_alone() -> None:
    half = jnp.ones((1, 96, 8), jnp.float16)
    assert not can_pack(half, half.shape)
    with pytest.raises(ValueError, match=r"shape \(1, 96, 8\) in float16 cannot be packed"):
        pack(half, half.shape)
    assert not half.is_deleted()


def test_rows_that_are_not_whole_words_are_refused() -> None:
    assert can_pack(weight("bfloat16", 1, 8, 6), (1, 8, 6))
    assert not can_pack(weight("bfloat16", 1, 8, 7), (1, 8, 7))
    assert not can_pack(quantize(np.ones((1, 8, 64), np.float32), "fp8_e4m3"), (1, 8, 64))
    with pytest.raises(ValueError, match=r"a weight of shape \(1, 8, 6\) in int8 cannot be packed"):
        pack(weight("int8", 1, 8, 6), (1, 8, 6))
