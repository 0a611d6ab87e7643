"""The TPU kernel in the interpreter, against float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quantized_matmul_oracle import expect
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul import mosaic_tpu
from pallas_kernels.quantized_matmul.api import check_supported
from pallas_kernels.quantized_matmul.tuning import Blocks, blocks_for
from pallas_kernels.quantized_matmul.weights import KINDS, quantize

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(120)]

SMALL = {
    "int8": Blocks(32, 128, 128, native_8bit=True),
    "fp8_e4m3": Blocks(32, 128, 128),
    "int4": Blocks(32, 128, 256),
}
SHAPES = [(1, 128, 256), (33, 200, 576), (70, 96, 512), (8, 320, 1024)]


def run(T: int, out: int, width: int, kind: Any, blocks: Blocks, *, group: int = 64, **options: Any) -> None:
    """Layer 1 of a stack of 3, whose other layers are of another size: a wrong layer cannot pass."""
    rng = np.random.default_rng(T + out + width)
    dtype = options.pop("dtype", jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((T, width)), dtype).at[T // 2, 3].mul(50).at[T // 3].set(0)
    sizes = np.array([50, 1, 20], np.float32)[:, None, None]
    stack = quantize(rng.standard_normal((3, out, width)).astype(np.float32) * sizes, kind, group=group)
    watching = pltpu.InterpretParams(
        detect_races=True,
        uninitialized_memory="nan",
        out_of_bounds_reads="uninitialized",  # the last block of outputs reaches beyond the weight
        dma_execution_mode=options.get("dma", "on_wait"),
    )

    @jax.jit
    def f(x: Any, stack: Any, layer: Any) -> jax.Array:
        return mosaic_tpu.matmul(x, stack, layer, jnp.dtype(x.dtype), blocks=blocks, interpret=watching)

    got = f(x, jax.tree.map(jnp.asarray, stack), jnp.int32(1))
    assert got.shape == (T, out)
    layer = jax.tree.map(lambda array: array[1], stack)
    expect(x, layer, got.dtype).check(got)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind: Any, shape: tuple[int, int, int]) -> None:
    run(*shape, kind, SMALL[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_at_once_and_float32(kind: Any) -> None:
    run(40, 256, 512, kind, SMALL[kind], dma="eager", dtype=jnp.float32)


def test_int8_on_a_chip_without_it() -> None:
    run(40, 130, 512, "int8", dataclasses.replace(SMALL["int8"], native_8bit=False))


@pytest.mark.parametrize("group", [32, 128])
def test_int4_groups(group: int) -> None:
    run(20, 130, 1024, "int4", SMALL["int4"], group=group)


@pytest.mark.parametrize("kind", KINDS)
def test_the_blocks_of_a_chip(kind: Any) -> None:
    run(20, 130, 512, kind, blocks_for("TPU v5 lite", kind))


def test_input_blocks() -> None:
    assert mosaic_tpu.input_block(4096, 1024, packed=False) == 1024
    assert mosaic_tpu.input_block(1408, 1024, packed=False) == 128
    assert mosaic_tpu.input_block(1408, 1024, packed=True) == 1408
    assert mosaic_tpu.input_block(576, 1024, packed=False) == 576
    check_supported("mosaic_tpu", "int8", out_features=8, in_features=28672)
    with pytest.raises(ValueError, match=r"cannot cut 11136 inputs of an int4 weight .* above 8192 .* multiple of 256"):
        check_supported("mosaic_tpu", "int4", out_features=8, in_features=11136)
    with pytest.raises(ValueError, match="102 outputs must be a multiple of 4, or at least 128"):
        check_supported("mosaic_tpu", "int4", out_features=102, in_features=256)
