"""The Hopper kernel in the interpreter, against float64: numbers, races, barriers, memory that nobody wrote."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.quantized_matmul_oracle import Expected, expect
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.quantized_matmul import mosaic_gpu
from pallas_kernels.quantized_matmul.api import check_supported
from pallas_kernels.quantized_matmul.tuning import Tiles, tiles_for
from pallas_kernels.quantized_matmul.weights import KINDS, quantize

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(200)]

SMALL = Tiles(outputs=64, inputs=128, stages=2, warpgroups=1, blocks=1)


TWO = dataclasses.replace(SMALL, warpgroups=2)


def run(T: int, out: int, width: int, kind: Any, tiles: Tiles, *, group: int = 64, dtype: Any = jnp.bfloat16) -> None:
    """Layer 1 of a stack of 3, whose other layers are of another size: a wrong layer cannot pass."""
    got, expected = compute(T, out, width, kind, tiles, group, dtype)
    assert got.shape == (T, out)
    expected.check(got)


def compute(T: int, out: int, width: int, kind: Any, tiles: Tiles, group: int, dtype: Any) -> tuple[Any, Expected]:
    rng = np.random.default_rng(T + out + width)
    x = jnp.asarray(rng.standard_normal((T, width)), dtype).at[T // 2, 3].mul(50).at[T // 3].set(0)
    sizes = np.array([50, 1, 20], np.float32)[:, None, None]
    stack = quantize(rng.standard_normal((3, out, width)).astype(np.float32) * sizes, kind, group=group)

    @jax.jit
    def f(x: Any, stack: Any, layer: Any) -> jax.Array:
        return mosaic_gpu.matmul(x, stack, layer, jnp.dtype(x.dtype), tiles=tiles)

    watching = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    with plgpu.force_gpu_interpret_mode(watching):
        got = np.asarray(f(x, jax.tree.map(jnp.asarray, stack), jnp.int32(1)))
    layer = jax.tree.map(lambda array: array[1], stack)
    return got, expect(x, layer, got.dtype)


@pytest.mark.parametrize("shape", [(1, 64, 384), (70, 192, 512)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind: Any, shape: tuple[int, int, int]) -> None:
    run(*shape, kind, SMALL)


@pytest.mark.parametrize("kind", KINDS)
def test_two_warpgroups_and_split_inputs(kind: Any) -> None:
    """18 steps over two splits, with a ragged tail of tokens."""
    run(129, 64, 1152, kind, dataclasses.replace(TWO, blocks=4), dtype=jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [8, 100])
def test_the_tiles_of_a_chip(kind: Any, tokens: int) -> None:
    run(tokens, 192, 576, kind, tiles_for("NVIDIA H100 80GB HBM3", kind, tokens))


@pytest.mark.parametrize("group", [32, 128])
def test_int4_groups(group: int) -> None:
    run(20, 64, 512, "int4", SMALL, group=group)


def test_int8_is_exact_however_it_is_split() -> None:
    whole, _ = compute(9, 64, 2048, "int8", SMALL, 64, jnp.float32)
    split, _ = compute(9, 64, 2048, "int8", dataclasses.replace(SMALL, blocks=4), 64, jnp.float32)
    np.testing.assert_array_equal(whole, split)


def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the tests: the kernel without its waits must not pass."""
    monkeypatch.setattr(plgpu, "barrier_wait", lambda _: None)
    with pytest.raises(Exception, match=r"(?i)race|barrier|above the bound"):
        run(8, 64, 1024, "int8", SMALL)


def test_what_cannot_be_tiled() -> None:
    check_supported("mosaic_gpu", "int8", out_features=960, in_features=576)
    with pytest.raises(ValueError, match="cuts int8 weights into tiles of 16 outputs: 100 must be a multiple"):
        check_supported("mosaic_gpu", "int8", out_features=100, in_features=576)
    with pytest.raises(ValueError, match="cuts fp8_e4m3 weights into tiles of 64 inputs: 96 must be a multiple"):
        check_supported("mosaic_gpu", "fp8_e4m3", out_features=96, in_features=96)
