"""The TPU kernel compiles for chips that are not here, fits their memory and reads a stack of weights in place."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fixtures.tpu_ahead_of_time import compile_on, mesh_of, needs_libtpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.weights import KINDS, QuantizedWeight, partition_specs

pytestmark = [pytest.mark.aot, needs_libtpu, pytest.mark.timeout(300)]

CHIPS = ("v5e", "v6e", "v5p", "v4")
LAYERS = 3
SMALL = 2**20
SHAPES = [(6144, 4096, 128), (4096, 14336, 128), (960, 576, 64), (576, 1536, 32), (8192, 28672, 32), (128256, 4096, 64)]


def stack_of(kind: Any, out: int, width: int, group: int) -> QuantizedWeight:
    shape: Any = jax.ShapeDtypeStruct
    if kind == "int4":
        grouped = (LAYERS, width // group, out)
        values = shape((LAYERS, out, width // 2), jnp.uint8)
        return QuantizedWeight(values, shape(grouped, jnp.float32), shape(grouped, jnp.uint8), kind=kind)
    stored = jnp.int8 if kind == "int8" else jnp.float8_e4m3fn
    return QuantizedWeight(shape((LAYERS, out, width), stored), shape((LAYERS, out), jnp.float32), kind=kind)


def scan(x: jax.Array, stack: QuantizedWeight) -> jax.Array:
    """The matmul in a loop over the layers of the stack."""

    def layer(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        return total + quantized_matmul(x, stack, layer=index, out_dtype=jnp.float32, backend="mosaic_tpu"), None

    start = jnp.zeros((x.shape[0], stack.shape[1]), jnp.float32)
    return jax.lax.scan(layer, start, jnp.arange(LAYERS))[0]


CASES = list(zip(itertools.product(CHIPS, KINDS, (8, 512)), itertools.cycle(SHAPES), strict=False))


@pytest.mark.parametrize(("setting", "shape"), CASES, ids=str)
def test_compiles_and_reads_the_stack_in_place(setting: tuple[str, Any, int], shape: tuple[int, int, int]) -> None:
    chip, kind, tokens = setting
    out, width, group = shape
    stack = stack_of(kind, out, width, group)
    specs = (P(), partition_specs(kind, None, None, None))
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    compiled = compile_on(mesh_of(chip), scan, specs, P(), x, stack)
    assert f"quantized_matmul_{kind}" in compiled.as_text()
    if out * width < SMALL:  # XLA may move a whole small stack nearer to the core
        return
    operands = tokens * (out * 4 * 3 + width * 4)
    assert compiled.memory_analysis().temp_size_in_bytes < operands + out * width // 8, "no copy of a layer"


@pytest.mark.parametrize("axes", [("tensor", None), (None, "tensor")], ids=["out", "in"])
@pytest.mark.parametrize("kind", KINDS)
def test_four_chips(kind: Any, axes: tuple[str | None, str | None]) -> None:
    stack = stack_of(kind, 4096, 4096, 128)
    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)

    def f(x: jax.Array, stack: QuantizedWeight) -> jax.Array:
        return jax.lax.psum(scan(x, stack), "tensor") if axes[1] else scan(x, stack)

    specs = (P(None, axes[1]), partition_specs(kind, None, *axes))
    compiled = compile_on(mesh_of("v5e", 4), f, specs, P(None, axes[0]), x, stack)
    assert f"quantized_matmul_{kind}" in compiled.as_text()
    assert ("all-reduce" in compiled.as_text()) == (axes[1] is not None)
