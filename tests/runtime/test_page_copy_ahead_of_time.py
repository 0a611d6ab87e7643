"""The engine's copies of pages compiled for chips that are not here: the pool stays in place, and nothing of its size is made."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxkv.models.config import ModelConfig
from jaxkv.runtime.page_copy import PAIRS, make_page_copy
from jaxkv.runtime.step import StepSpec
from pallas_kernels.absent_devices import absent_devices, why_unavailable, without_compilation_cache
from pallas_kernels.backends import TRAITS, Backend, layout_for
from pallas_kernels.kv_layout import KVLayout, KVPages

pytestmark = [pytest.mark.aot, pytest.mark.timeout(300)]

MODEL = ModelConfig(
    vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_layers=16, num_heads=32, num_kv_heads=8,
    head_dim=64, max_position=4096,
)  # fmt: skip
NUM_BLOCKS = 1000
IN_PLACE = {"parameter", "custom-call", "bitcast", "get-tuple-element", "tuple"}
"""What may have the pool as its result: the kernel's own is an argument of it."""
# chip, devices, KV pool, whether its scales are static.
CASES = [
    ("v5e", 1, "int8", False),
    ("v5e", 4, "bfloat16", False),
    ("v5e", 8, "float8_e5m2", False),
    ("v6e", 1, "bfloat16", False),
    ("v6e", 4, "int8", True),
    ("v6e", 8, "int8", False),
    ("h100", 1, "bfloat16", False),
    ("h100", 1, "int8", False),
    ("h100", 8, "float8_e4m3fn", False),
    ("h100", 8, "int8", True),
]


@pytest.mark.parametrize(("chip", "devices", "dtype", "static"), CASES)
def test_the_pool_stays_in_place(chip: str, devices: int, dtype: str, static: bool) -> None:
    spec = _spec(chip, devices, dtype, static)
    compiled = _compile(spec, make_page_copy(spec))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= (NUM_BLOCKS + 1) * spec.layout.bytes_per_page // devices
    assert memory.temp_size_in_bytes < 2**20
    text = compiled.as_text()
    for size in _part_sizes(spec.layout, devices):
        operations = _operations(text, size)
        assert {"parameter", "custom-call"} <= operations <= IN_PLACE
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", text)


@pytest.mark.parametrize("chip", ["v5e", "h100"])
def test_a_pool_that_is_copied_is_noticed(chip: str) -> None:
    """A test of the test: where the pool is not donated."""
    spec = _spec(chip, 1, "int8", False)
    in_place: Any = make_page_copy(spec)
    compiled = _compile(spec, jax.jit(lambda *args: in_place(*args)))
    for size in _part_sizes(spec.layout, 1):
        assert not _operations(compiled.as_text(), size) <= IN_PLACE


def _spec(chip: str, devices: int, dtype: str, static: bool) -> StepSpec:
    if reason := why_unavailable(chip):
        pytest.skip(reason)
    backend: Backend = "mosaic_gpu" if chip == "h100" else "mosaic_tpu"
    layout = layout_for(
        backend, num_layers=MODEL.num_layers, num_kv_heads=MODEL.num_kv_heads, head_dim=MODEL.head_dim,
        page_size=TRAITS[backend].page_size, dtype=dtype, static_scales=static, shards=devices,
    )  # fmt: skip
    grid = np.array(absent_devices(chip, devices)).reshape(1, devices)
    mesh = Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    return StepSpec(MODEL, layout, mesh, backend, "bfloat16", quantized=False)


def _compile(spec: StepSpec, copy: Any) -> jax.stages.Compiled:
    layout, scales = spec.layout, spec.layout.scales_shape(NUM_BLOCKS + 1)
    pages = jax.ShapeDtypeStruct(layout.pages_shape(NUM_BLOCKS + 1), layout.pages_dtype)
    pool = (KVPages(pages, None if scales is None else jax.ShapeDtypeStruct(scales, jnp.float32)),)
    ids = jax.ShapeDtypeStruct((PAIRS,), jnp.int32)
    with without_compilation_cache(), jax.set_mesh(spec.mesh):
        compiled: jax.stages.Compiled = copy.lower(pool, ids, ids).compile()
    return compiled


def _part_sizes(layout: KVLayout, devices: int) -> list[int]:
    """Elements of one device's pages, and of its scales per token."""
    shapes = [layout.pages_shape(NUM_BLOCKS + 1)]
    if layout.scales == "token":
        shapes.append(layout.scales_shape(NUM_BLOCKS + 1))
    return [math.prod(shape) // devices for shape in shapes]


def _operations(text: str, size: int) -> set[str]:
    """What has a result, or a part of one, of so many elements."""
    found = re.findall(r"= (\(.*?\)|\S+) ([\w-]+)\(", text)
    return {
        name
        for kind, name in found
        if size in {math.prod(map(int, d.split(","))) for d in re.findall(r"\[([\d,]+)\]", kind)}
    }
