"""The TPU attention kernels compile for chips that are not here, fit their memory and leave the pool where it is."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from fixtures.tpu_ahead_of_time import compile_on, mesh_of, needs_libtpu
from jax.sharding import PartitionSpec as P

from pallas_kernels import kv_orders_tpu
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention import mosaic_tpu

pytestmark = [pytest.mark.aot, needs_libtpu, pytest.mark.timeout(300)]

LAYERS, SEQS, CONTEXT = 2, 64, 2048


@dataclasses.dataclass(frozen=True)
class Case:
    chip: str
    dtype: str
    K: int
    G: int
    D: int
    page: int
    tokens: int
    scales: str | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    devices: int = 1

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self) if value not in (None, False))


def _cases() -> list[Case]:
    """Every value of every setting with every chip; the settings among each other in rotation."""
    heads = itertools.cycle(
        [(8, 4, 128), (8, 4, 64), (4, 1, 128), (1, 8, 128), (2, 7, 128), (2, 4, 256), (3, 3, 64), (16, 1, 64)]
    )
    pages = itertools.cycle([128, 16, 64, 32, 256])
    extras = itertools.cycle([{}, {"window": 1024}, {"soft_cap": 30.0, "sinks": True}])
    tokens = itertools.cycle([64, 512])
    cases = []
    for chip in ("v5e", "v6e", "v5p", "v4"):
        for dtype, scales in [
            ("bfloat16", None), ("bfloat16", None), ("float32", None), ("int8", "static"), ("int8", "token"),
            ("float8_e4m3fn", "static"), ("float8_e4m3fn", "token"), ("float8_e5m2", "static"),
        ]:  # fmt: skip
            K, G, D = next(heads)
            page = next(pages)
            cases.append(Case(chip, dtype, K, G, D, page, next(tokens), scales, **next(extras)))
    cases.append(Case("v5e", "bfloat16", 8, 4, 128, 128, 512, devices=4))
    cases.append(Case("v6e", "int8", 8, 8, 128, 128, 64, "token", devices=4))
    return cases


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_compiles_and_reads_the_pool_in_place(case: Case) -> None:
    mesh = mesh_of(case.chip, case.devices)
    layout = KVLayout(
        LAYERS, case.K // case.devices, case.D, case.page, case.dtype, "token_major", case.scales or "none"
    )
    num_pages = SEQS * CONTEXT // case.page
    heads = P(None, "tensor")
    H = case.K * case.G
    shape = jax.ShapeDtypeStruct
    pool = kv_orders_tpu.pages_shape(LAYERS, num_pages, case.page, case.K, case.D)
    scales = spec = None
    if case.scales == "token":
        scales = shape(
            kv_orders_tpu.token_scales_shape(LAYERS, num_pages, case.page, case.K, case.devices), jnp.float32
        )
        spec = P(None, None, "tensor")
    elif case.scales == "static":
        scales, spec = shape((LAYERS, 2, case.K), jnp.float32), P(None, None, "tensor")
    kv = KVPages(shape(pool, jnp.dtype(case.dtype)), scales)
    ints = [shape(dims, jnp.int32) for dims in ((), (SEQS, CONTEXT // case.page), (SEQS + 1,), (SEQS,), ())]
    q = shape((case.tokens, H, case.D), jnp.float32 if case.dtype == "float32" else jnp.bfloat16)
    sinks = shape((H,), jnp.float32) if case.sinks else None

    def call(q, kv, layer, page_table, cu_q_lens, kv_lens, num_seqs, sinks):
        return mosaic_tpu.attend(
            q, kv, layer, page_table, cu_q_lens, kv_lens, num_seqs, layout=layout, scale=0.1,
            sliding_window=case.window, logit_soft_cap=case.soft_cap, sinks=sinks,
        )  # fmt: skip

    specs = (
        heads,
        KVPages(P(None, None, None, "tensor"), spec),
        P(),
        P(),
        P(),
        P(),
        P(),
        P("tensor") if sinks else None,
    )
    compiled = compile_on(mesh, call, specs, heads, q, kv, *ints, sinks)
    text = compiled.as_text()
    names = [name for name in ("ragged_paged_attention_decode", "ragged_paged_attention_prefill") if name in text]
    assert len(names) == 2, "both kernels are part of the program"
    pool_bytes = layout.bytes_per_page * num_pages
    assert compiled.memory_analysis().temp_size_in_bytes < pool_bytes // 2, "no copy of the pool"
    local = ",".join(str(n) for n in (*pool[:-1], pool[-1] // case.devices))
    copies = [line for line in text.splitlines() if f"[{local}]" in line and " copy(" in line]
    assert not copies
