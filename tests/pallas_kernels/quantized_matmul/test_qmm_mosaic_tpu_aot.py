"""The TPU kernel compiles for chips that are not here, fits their memory and reads a stack of weights in place."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fixtures.quantized_matmul_aot import SHAPES, scan, stack_of
from fixtures.tpu_ahead_of_time import compile_on, mesh_of, needs_libtpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantized_matmul.weights import KINDS, QuantizedWeight, partition_specs

pytestmark = [pytest.mark.aot, needs_libtpu, pytest.mark.timeout(300)]

CHIPS = ("v5e", "v6e", "v5p", "v4")
SMALL = 2**20
scan_on_tpu = functools.partial(scan, backend="mosaic_tpu")
CASES = list(zip(itertools.product(CHIPS, KINDS, (8, 512)), itertools.cycle(SHAPES), strict=False))


@pytest.mark.parametrize(("setting", "shape"), CASES, ids=str)
def test_compiles_and_reads_the_stack_in_place(setting: tuple[str, Any, int], shape: tuple[int, int, int]) -> None:
    chip, kind, tokens = setting
    out, width, group = shape
    stack = stack_of(kind, out, width, group)
    specs = (P(), partition_specs(kind, None, None, None))
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    compiled = compile_on(mesh_of(chip), scan_on_tpu, specs, P(), x, stack)
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
        return jax.lax.psum(scan_on_tpu(x, stack), "tensor") if axes[1] else scan_on_tpu(x, stack)

    specs = (P(None, axes[1]), partition_specs(kind, None, *axes))
    compiled = compile_on(mesh_of("v5e", 4), f, specs, P(None, axes[0]), x, stack)
    assert f"quantized_matmul_{kind}" in compiled.as_text()
    assert ("all-reduce" in compiled.as_text()) == (axes[1] is not None)
