"""The Hopper kernel compiled for an H100 that is not here: `wgmma`, TMA, no spills, and a stack of weights read in place."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.absent_devices import why_unavailable
from pallas_kernels.inspection import nvidia
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.weights import KINDS, QuantizedWeight

WHY_NOT = why_unavailable("h100")
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.timeout(300),
]

LAYERS = 3
SHAPES = [
    (6144, 4096, 128),
    (4096, 14336, 128),
    (960, 576, 64),
    (576, 1536, 32),
    (8192, 28672, 128),
    (128256, 4096, 64),
]
CASES = [
    *zip(itertools.product(KINDS, (8, 64, 512)), itertools.cycle(SHAPES), strict=False),
    *((("int4", tokens), SHAPES[i]) for tokens, i in ((8, 2), (512, 0))),
    (("fp8_e4m3", 8), SHAPES[2]),
    (("int8", 512), SHAPES[0]),
]
"""Every choice of tiles, with outputs that the widest divides and others."""


@pytest.mark.parametrize(("setting", "shape"), CASES, ids=str)
def test_compiles_without_spills(setting: tuple[Any, int], shape: tuple[int, int, int]) -> None:
    kind, tokens = setting
    out, width, group = shape
    abstract: Any = jax.ShapeDtypeStruct
    if kind == "int4":
        grouped = (LAYERS, width // group, out)
        values = abstract((LAYERS, out, width // 2), jnp.uint8)
        stack = QuantizedWeight(values, abstract(grouped, jnp.float32), abstract(grouped, jnp.uint8), kind=kind)
    else:
        values = abstract((LAYERS, out, width), jnp.int8 if kind == "int8" else jnp.float8_e4m3fn)
        stack = QuantizedWeight(values, abstract((LAYERS, out), jnp.float32), kind=kind)

    def scan(x: jax.Array, stack: QuantizedWeight) -> jax.Array:
        def layer(total: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            return total + quantized_matmul(x, stack, layer=index, out_dtype=jnp.float32, backend="mosaic_gpu"), None

        return jax.lax.scan(layer, jnp.zeros((tokens, out), jnp.float32), jnp.arange(LAYERS))[0]

    compiled, reports = nvidia.compile_for_h100(scan, abstract((tokens, width), jnp.bfloat16), stack)
    assert [report.name for report in reports] == [f"quantized_matmul_{kind}"]
    report = reports[0]
    assert (report.stack_bytes, report.spill_bytes) == (0, 0), report
    assert report.wgmma > 0
    assert report.tensor_copies > 0
    assert not report.serialized
    # No instruction but the kernel's yields or takes one layer of the weight.
    one_layer = f"[1,{out},{values.shape[2]}]"
    lines = re.findall(r"^.*= \S+ (?:fusion|copy|dynamic-slice)\(.*$", compiled.as_text(), re.MULTILINE)
    assert not [line for line in lines if one_layer in line or f"[{out},{values.shape[2]}]" in line]
