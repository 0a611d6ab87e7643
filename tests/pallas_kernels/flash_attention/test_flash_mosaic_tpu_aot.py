"""The TPU kernel compiles for chips that are not here, fits their memory, and reads what projections make in place."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fixtures.tpu_ahead_of_time import compile_on, mesh_of, needs_libtpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.flash_attention.api import flash_attention

pytestmark = [pytest.mark.aot, needs_libtpu, pytest.mark.timeout(300)]


@dataclasses.dataclass(frozen=True)
class Case:
    chip: str
    D: int
    K: int
    G: int
    Tq: int
    Tk: int
    dtype: str = "bfloat16"
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    lens: bool = True
    devices: int = 1

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self) if value not in (None, False))


ALL: dict[str, Any] = {"window": 1024, "soft_cap": 30.0, "sinks": True}
CASES = [
    Case("v5e", 128, 8, 4, 2048, 2048, lens=False),
    Case("v5e", 64, 8, 4, 517, 4100, **ALL),
    Case("v5e", 256, 1, 8, 64, 2048, "float32", causal=False),
    Case("v5e", 128, 8, 4, 2048, 2048, devices=4),
    Case("v6e", 64, 3, 3, 300, 300, sinks=True),
    Case("v6e", 128, 4, 16, 4096, 4096, "float32", **ALL),
    Case("v6e", 256, 4, 2, 4096, 8192, window=4096),
    Case("v5p", 128, 8, 8, 8192, 8192, causal=False, soft_cap=50.0),
    Case("v5p", 64, 2, 7, 5, 2048, "float32"),
    Case("v5p", 256, 16, 1, 2048, 2048, sinks=True),
    Case("v4", 128, 16, 1, 2048, 2048, "float32", **ALL),
    Case("v4", 64, 1, 16, 1, 129, causal=False),
    Case("v4", 256, 2, 4, 1024, 1024, "float32", sinks=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: Case) -> None:
    """Operands are [B, T, heads * head_dim], as projections leave them."""
    B, H = 4, case.K * case.G
    dtype = jnp.dtype(case.dtype)

    def call(q: Any, k: Any, v: Any, q_lens: Any, kv_lens: Any, sinks: Any) -> jax.Array:
        q, k, v = (x.reshape(*x.shape[:2], -1, case.D) for x in (q, k, v))
        out = flash_attention(
            q, k, v, scale=0.1, causal=case.causal, q_lens=q_lens, kv_lens=kv_lens, sliding_window=case.window,
            logit_soft_cap=case.soft_cap, sinks=sinks, backend="mosaic_tpu",
        )  # fmt: skip
        return out.reshape(*out.shape[:2], -1)

    shape = jax.ShapeDtypeStruct
    q, k, v = (
        shape((B, T, heads * case.D), dtype) for T, heads in ((case.Tq, H), (case.Tk, case.K), (case.Tk, case.K))
    )
    lens = shape((B,), jnp.int32) if case.lens else None
    sinks = shape((H,), jnp.float32) if case.sinks else None
    split = P(None, None, "tensor")
    specs = (
        split,
        split,
        split,
        P() if case.lens else None,
        P() if case.lens else None,
        P("tensor") if sinks else None,
    )
    compiled = compile_on(mesh_of(case.chip, case.devices), call, specs, split, q, k, v, lens, lens, sinks)
    assert "flash_attention" in compiled.as_text()
    aligned = case.Tq % 2048 == 0 and case.Tk % 16 == 0 and (case.D > 64 or case.K % 2 == 0)
    if aligned:
        operand = case.Tk * B * case.K * case.D * dtype.itemsize // case.devices
        assert compiled.memory_analysis().temp_size_in_bytes < operand // 8, "no copy of an operand"
        lines = compiled.as_text().splitlines()
        assert not [line for line in lines if " copy(" in line or " reshape(" in line or " transpose(" in line]
