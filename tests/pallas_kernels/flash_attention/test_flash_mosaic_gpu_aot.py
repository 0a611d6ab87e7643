"""The Hopper kernel compiled for an H100 that is not here: registers, spills, `wgmma` and TMA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.absent_devices import why_unavailable
from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.inspection import nvidia

WHY_NOT = why_unavailable("h100")
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.timeout(300),
]

ALL: dict[str, Any] = {"sliding_window": 1024, "logit_soft_cap": 30.0}


@pytest.mark.parametrize(
    ("head_dim", "group", "lengths", "dtype", "options"),
    [
        (64, 1, (2048, 2048), "bfloat16", {"causal": True}),
        (64, 8, (100, 300), "float16", {"causal": True, "sinks": True, **ALL}),
        (128, 4, (4096, 4096), "bfloat16", {"causal": True}),
        (128, 7, (517, 517), "float16", {"causal": False, "logit_soft_cap": 30.0}),
        (128, 16, (2048, 4096), "bfloat16", {"causal": True, "sinks": True, **ALL}),
        (256, 4, (20, 4096), "bfloat16", {"causal": False, "sinks": True}),
        (256, 2, (2048, 2048), "bfloat16", {"causal": True, "sinks": True, **ALL}),
    ],
    ids=str,
)
def test_compiles_without_spills(
    head_dim: int, group: int, lengths: tuple[int, int], dtype: str, options: dict[str, Any]
) -> None:
    B, K, (Tq, Tk) = 2, 8, lengths
    has_sinks = options.get("sinks", False)
    rest = {name: value for name, value in options.items() if name != "sinks"}

    def call(q: Any, k: Any, v: Any, q_lens: Any, kv_lens: Any, sinks: Any) -> jax.Array:
        return flash_attention(
            q, k, v, scale=0.1, q_lens=q_lens, kv_lens=kv_lens, sinks=sinks, backend="mosaic_gpu", **rest
        )

    shape = jax.ShapeDtypeStruct
    q, k = (shape((B, T, heads, head_dim), jnp.dtype(dtype)) for T, heads in ((Tq, K * group), (Tk, K)))
    lens = shape((B,), jnp.int32)
    sinks = shape((K * group,), jnp.float32) if has_sinks else None
    compiled, reports = nvidia.compile_for_h100(call, q, k, k, lens, lens, sinks)
    (report,) = reports
    assert report.name == "flash_attention"
    assert (report.stack_bytes, report.spill_bytes) == (0, 0), report
    assert report.registers <= 168  # 65,536 over 384 threads; the roles then share them out among themselves
    assert report.wgmma > 0
    assert report.tensor_copies > 0
    assert not report.serialized
    if Tq % 8 == 0 and Tk % 8 == 0 and Tq >= 128:
        assert compiled.memory_analysis().temp_size_in_bytes < q.size // 8, "no copy of an operand"
