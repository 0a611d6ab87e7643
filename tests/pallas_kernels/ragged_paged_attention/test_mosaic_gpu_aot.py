"""The Hopper kernels compiled for an H100 that is not here: registers, spills, `wgmma` and TMA, and no copy of the pool."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fixtures.pairwise import pairwise

from pallas_kernels.absent_devices import why_unavailable
from pallas_kernels.inspection import nvidia
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention import mosaic_gpu

WHY_NOT = why_unavailable("h100")
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.timeout(300),
]

POOLS = [
    ("bfloat16", "none"),
    ("int8", "token"),
    ("int8", "static"),
    ("float8_e4m3fn", "token"),
    ("float8_e5m2", "static"),
]
OPTIONS = {"plain": {}, "all": {"sliding_window": 1024, "logit_soft_cap": 30.0, "has_sinks": True}}
SETTINGS = {
    "head_dim": (64, 128, 256),
    "pool": POOLS,
    "group": (1, 4, 7, 8),
    "page_size": (16, 64, 128),
    "options": tuple(OPTIONS),
}
CASES = pairwise(SETTINGS)
PAGES = 1000
MET: set[tuple[str, tuple[object, ...]]] = set()
"""Kernels that this process compiled: Mosaic compiles each once, and reports once. Decodes pad groups to multiples of 8."""


def compiled(head_dim: int, group: int, page_size: int, dtype: str, scales: str, **options: object):
    layout = KVLayout(4, 8, head_dim, page_size, dtype, scales=scales)
    H, S, T = 8 * group, 64, 2048
    spec = mosaic_gpu.call_spec(layout, num_heads=H, scale=head_dim**-0.5, **options)
    shape = jax.ShapeDtypeStruct
    scale_shape = layout.scales_shape(PAGES)
    kv = KVPages(
        shape(layout.pages_shape(PAGES), jnp.dtype(dtype)),
        None if scale_shape is None else shape(scale_shape, jnp.float32),
    )
    ints = [shape(dims, jnp.int32) for dims in ((), (S, 2048 // page_size), (S + 1,), (S,), ())]
    sinks = shape((H,), jnp.float32) if spec.has_sinks else None

    def call(q, kv, sinks, *ints):
        return mosaic_gpu.attend(q, kv, *ints, spec=spec, sinks=sinks)

    executable, reports = nvidia.compile_for_h100(call, shape((T, H, head_dim), jnp.bfloat16), kv, sinks, *ints)
    settings = (head_dim, page_size, dtype, scales, *sorted(options.items()))
    kernels = {"paged_decode": (-(-group // 8), *settings), "paged_prefill": (group, *settings)}
    met = {name for name, kernel in kernels.items() if (name, kernel) in MET}
    MET.update(kernels.items())
    return executable, reports, met


def check(reports: list[nvidia.KernelReport], group: int, met: set[str]) -> None:
    """met: the kernels that have no report, as the process compiled them before."""
    by_name = {report.name: report for report in reports}
    assert met | by_name.keys() >= {"paged_decode", "paged_prefill"}, reports
    attention = [by_name[name] for name in ("paged_decode", "paged_prefill") if name in by_name]
    for report in attention:
        assert report.wgmma > 0
        assert report.tensor_copies > 0
        assert not report.serialized
    for report in reports:
        assert (report.stack_bytes, report.spill_bytes) == (0, 0), report
        assert report.name == "paged_prefill" or group > 8 or report.registers <= 96, report


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_every_two_settings(case: dict[str, Any]) -> None:
    _, reports, met = compiled(
        case["head_dim"], case["group"], case["page_size"], *case["pool"], **OPTIONS[case["options"]]
    )
    check(reports, case["group"], met)


@pytest.mark.parametrize(("head_dim", "options"), [(128, "plain"), (256, "all")])
def test_the_largest_group_of_rows(head_dim: int, options: str) -> None:
    """Eight heads to a tile, bfloat16: where registers are fewest."""
    _, reports, met = compiled(head_dim, 8, 64, "bfloat16", "none", **OPTIONS[options])
    check(reports, 8, met)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "page_size"), list(itertools.product([1, 7, 8, 16], [16, 32, 128])))
def test_every_group_and_page_size(group: int, page_size: int) -> None:
    _, reports, met = compiled(128, group, page_size, "bfloat16", "none")
    check(reports, group, met)


def test_the_pool_is_not_copied() -> None:
    executable, *_ = compiled(128, 4, 64, "bfloat16", "none")
    pool = math.prod(KVLayout(4, 8, 128, 64, "bfloat16").pages_shape(PAGES))
    copies = re.findall(r"= bf16\[([\d,]+)\]\S* (?:copy|transpose|fusion)\(", executable.as_text())
    assert all(math.prod(map(int, dims.split(","))) < pool for dims in copies)
