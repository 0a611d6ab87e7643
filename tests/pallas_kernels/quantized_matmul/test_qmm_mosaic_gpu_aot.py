"""The Hopper kernel compiled for an H100 that is not here: `wgmma`, TMA, no spills, and a stack of weights read in place."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fixtures.quantized_matmul_aot import SHAPES, scan, stack_of

from pallas_kernels.absent_devices import why_unavailable
from pallas_kernels.inspection import nvidia
from pallas_kernels.quantized_matmul.tuning import tiles_for
from pallas_kernels.quantized_matmul.weights import KINDS

WHY_NOT = why_unavailable("h100")
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.timeout(300),
]

CASES = [
    *zip(itertools.product(KINDS, (8, 64, 512)), itertools.cycle(SHAPES), strict=False),
    *((("int4", tokens), SHAPES[i]) for tokens, i in ((8, 2), (512, 0))),
    (("fp8_e4m3", 8), SHAPES[2]),
    (("int8", 512), SHAPES[0]),
    (("int4", 512), SHAPES[3]),
]
"""Every choice of tiles, with outputs that the widest divides and others, and int4 in groups of 32, 64 and 128."""


@pytest.mark.parametrize(("setting", "shape"), CASES, ids=str)
def test_compiles_without_spills(setting: tuple[Any, int], shape: tuple[int, int, int]) -> None:
    kind, tokens = setting
    out, width, group = shape
    stack, x = stack_of(kind, out, width, group), jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    compiled, reports = nvidia.compile_for_h100(functools.partial(scan, backend="mosaic_gpu"), x, stack)
    assert [report.name for report in reports] == [f"quantized_matmul_{kind}"]
    report = reports[0]
    assert (report.stack_bytes, report.spill_bytes) == (0, 0), report
    assert report.wgmma > 0
    assert report.tensor_copies > 0
    assert not report.serialized
    tiles = tiles_for("NVIDIA H100 80GB HBM3", kind, tokens)
    if tiles.registers is not None:
        # A warpgroup that asks for more than the others give back waits forever, and no compiler says so.
        wanted = tiles.warpgroups * tiles.registers[0] + tiles.registers[1]
        assert report.registers * (tiles.warpgroups + 1) >= wanted
        assert all(registers % 8 == 0 for registers in tiles.registers)
    # No instruction but the kernel's yields or takes one layer of the weight.
    stored = stack.values.shape[2]
    one_layer = f"[1,{out},{stored}]"
    lines = re.findall(r"^.*= \S+ (?:fusion|copy|dynamic-slice)\(.*$", compiled.as_text(), re.MULTILINE)
    assert not [line for line in lines if one_layer in line or f"[{out},{stored}]" in line]
