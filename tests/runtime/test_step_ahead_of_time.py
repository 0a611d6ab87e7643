"""The whole step compiled for chips that are not here: it fits, the pool stays in place, and no table is gathered."""

from __future__ import annotations

import re

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxkv.cache.budget import DeviceMemory, plan_pool
from jaxkv.core.errors import ConfigError
from jaxkv.models.config import ModelConfig, RopeConfig
from jaxkv.runtime.abstract_step import compile_step
from jaxkv.runtime.head_split import split_heads
from jaxkv.runtime.step import StepSpec
from jaxkv.runtime.step_batch import make_buckets
from jaxkv.runtime.workspace import workspace_bytes
from pallas_kernels.absent_devices import CHIPS, absent_devices, why_unavailable, without_compilation_cache
from pallas_kernels.backends import TRAITS, Backend, layout_for
from pallas_kernels.ragged_paged_attention.api import check_supported

SMALL = ModelConfig(
    vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_layers=16, num_heads=32, num_kv_heads=8,
    head_dim=64, max_position=4096,
)  # fmt: skip
LLAMA_3_70B = ModelConfig(
    vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64, num_kv_heads=8,
    head_dim=128, max_position=8192, rope=RopeConfig(theta=500_000.0),
)  # fmt: skip
SEQS, CONTEXT = 64, 4096
WIDEST = 2048
"""Rows of the largest step on accelerators, by default."""

# chip, devices, model, weights, KV pool, rows of the step. int8 weights where bfloat16 ones would not fit.
CASES = [
    ("v5e", 1, SMALL, "bfloat16", "bfloat16", SEQS),
    ("v6e", 1, SMALL, "int8", "float8_e4m3fn", SEQS),
    ("v5p", 1, SMALL, "bfloat16", "int8", SEQS),
    ("h100", 1, SMALL, "bfloat16", "bfloat16", SEQS),
    ("v5e", 8, SMALL, "bfloat16", "int8", SEQS),
    ("v6e", 8, SMALL, "bfloat16", "bfloat16", SEQS),
    ("v5p", 8, SMALL, "bfloat16", "bfloat16", SEQS),
    ("h100", 8, SMALL, "int8", "float8_e4m3fn", SEQS),
    ("v5p", 1, LLAMA_3_70B, "int8", "bfloat16", SEQS),
    ("h100", 1, LLAMA_3_70B, "int8", "int8", SEQS),
    ("v5e", 8, LLAMA_3_70B, "int8", "bfloat16", WIDEST),
    ("v6e", 8, LLAMA_3_70B, "bfloat16", "float8_e4m3fn", SEQS),
    ("v5p", 8, LLAMA_3_70B, "bfloat16", "bfloat16", SEQS),
    ("h100", 8, LLAMA_3_70B, "bfloat16", "float8_e4m3fn", WIDEST),
]


def name_of(case: tuple[str, int, ModelConfig, str, str, int]) -> str:
    chip, devices, model, weights, pool, rows = case
    return f"{chip}x{devices}-{'small' if model is SMALL else '70b'}-{weights}-{pool}-{rows}"


@pytest.mark.aot
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_step_compiles_and_fits(case: tuple[str, int, ModelConfig, str, str, int]) -> None:
    chip, devices, model, weights, pool_dtype, rows = case
    if reason := why_unavailable(chip):
        pytest.skip(reason)
    backend: Backend = "mosaic_gpu" if chip == "h100" else "mosaic_tpu"
    split, page = split_heads(model, devices), TRAITS[backend].page_size
    layout = layout_for(
        backend, num_layers=split.num_layers, num_kv_heads=split.num_kv_heads, head_dim=split.head_dim, page_size=page,
        dtype=pool_dtype, shards=devices,
    )  # fmt: skip
    check_supported(backend, layout, num_heads=split.num_heads)
    pages = CONTEXT // page
    buckets = make_buckets(max_num_batched_tokens=WIDEST, max_num_seqs=SEQS, max_pages=pages)
    grid = np.array(absent_devices(chip, devices)).reshape(1, devices)
    mesh = Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Auto))
    spec = StepSpec(split, layout, mesh, backend, "bfloat16", quantized=weights == "int8")
    num_blocks = (2 * 2**30 * devices) // layout.bytes_per_page
    with without_compilation_cache():
        compiled = compile_step(spec, buckets, tokens=rows, pages=pages, num_blocks=num_blocks)

    memory = compiled.memory_analysis()
    pool_bytes = (num_blocks + 1) * layout.bytes_per_page // devices
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < workspace_bytes(split, buckets, shards=devices)
    assert memory.temp_size_in_bytes < pool_bytes / 2
    assert memory.peak_memory_in_bytes < CHIPS[chip].hbm_bytes
    text = compiled.as_text()
    parts = [(layout.pages_shape(num_blocks + 1), layout.pages_head_axis)]
    if layout.scales == "token":
        parts.append((layout.scales_shape(num_blocks + 1), layout.scales_head_axis))
    for whole, head_axis in parts:
        shape = [size // devices if axis == head_axis else size for axis, size in enumerate(whole)]
        dims = ",".join(map(str, shape))
        assert re.search(rf"\[{dims}\]", text), "the pool is not in the program: this test looks for the wrong shape"
        assert not re.findall(rf"= \w+\[{dims}\]\S* copy\(", text)
    assert not re.findall(rf"= .*\[{split.vocab_size},{split.hidden_size}\].* all-gather", text)


def test_70b_is_refused_where_its_weights_cannot_fit() -> None:
    """The cases above leave out 70B on one v5e or v6e: the planner refuses those before anything is compiled."""
    layout = layout_for("mosaic_tpu", num_layers=80, num_kv_heads=8, head_dim=128, page_size=128, dtype="bfloat16")
    for chip in ("v5e", "v6e"):
        hbm = CHIPS[chip].hbm_bytes
        with pytest.raises(ConfigError, match="not even one block fits"):
            plan_pool(
                layout, shards=1, memory=DeviceMemory(hbm, hbm), weight_bytes=70 * 2**30, workspace_bytes=2**28,
                memory_utilization=0.9, kv_cache_memory_bytes=None, max_model_len=4096, max_num_seqs=64,
            )  # fmt: skip
