"""Every Hopper attention kernel that an engine may choose, each compiled once: `make aot-all`. CI compiles a few that its covering array
(`test_mosaic_gpu_aot`) has not."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.absent_devices import why_unavailable
from pallas_kernels.inspection import nvidia
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_gpu_decode, mosaic_gpu_prefill
from pallas_kernels.ragged_paged_attention import mosaic_gpu_prefill_plan as prefill_plan

WHY_NOT = why_unavailable("h100")
pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.timeout(300),
]

POOLS = (
    ("bfloat16", "none"),
    *itertools.product(("int8", "float8_e4m3fn", "float8_e5m2"), ("token", "static")),
)
SETTINGS: dict[str, tuple[Any, ...]] = {
    "head_dim": (64, 128, 256),
    "pool": POOLS,
    "group": tuple(range(1, 17)),
    "page_size": (16, 32, 64, 128, 256),
    "window": (None, 128, 1024, 4096),
    "soft_cap": (None, 30.0),
    "sinks": (False, True),
}
KV_HEADS, SEQS, CONTEXT, ROWS, PAGES = 8, 64, 2048, 512, 1000


@dataclass(frozen=True)
class Kernel:
    """A kernel of the product: the first combination of settings that gives it, by name."""

    name: str
    settings: tuple[Any, ...]

    def __str__(self) -> str:
        return "-".join(map(str, (self.name, *self.settings))).replace(" ", "")

    @property
    def layout(self) -> KVLayout:
        head_dim, (dtype, scales), _, page_size, *_ = self.settings
        return KVLayout(4, KV_HEADS, head_dim, page_size, dtype, scales=scales)

    @functools.cached_property
    def spec(self) -> Any:
        head_dim, _, group, _, window, soft_cap, sinks = self.settings
        return mosaic_gpu.call_spec(
            self.layout,
            num_heads=KV_HEADS * group,
            scale=head_dim**-0.5,
            sliding_window=window,
            logit_soft_cap=soft_cap,
            has_sinks=sinks,
        )


def decode_key(kernel: Kernel) -> tuple[Any, ...]:
    """What the code of the decode kernel depends on, and of its combining one: the rest of the settings are numbers in it."""
    spec, (head_dim, pool, _, page_size, window, soft_cap, sinks) = kernel.spec, kernel.settings
    copies = (min(page_size, 2 * mosaic_gpu.KEY_TILE), mosaic_gpu_decode.copied_keys(spec))
    # Sinks concern the combining kernel alone, to which the pool and its pages are nothing: they come with every other one.
    return (
        mosaic_gpu_decode.padded_group(spec),
        head_dim,
        pool,
        copies,
        window is None,
        soft_cap,
        sinks == bool(soft_cap),
    )


def prefill_key(kernel: Kernel) -> tuple[Any, ...]:
    """The same of the prefill kernel: a group that is split sees another place of its queries, no other code."""
    spec, (head_dim, pool, _, page_size, window, soft_cap, sinks) = kernel.spec, kernel.settings
    shape, tuning = prefill_plan.Shape.of(spec), mosaic_gpu.prefill_tuning(spec)
    return (
        shape.heads,
        shape.splits > 1,
        head_dim,
        pool,
        min(page_size, 2 * tuning.keys),
        window is None,
        soft_cap,
        sinks,
    )


@functools.cache
def product() -> list[Kernel]:
    """All kernels once, in random order: a run that is stopped has seen some of each kind."""
    kernels: dict[tuple[Any, ...], Kernel] = {}
    for settings in itertools.product(*SETTINGS.values()):
        decode, prefill = (Kernel(name, settings) for name in ("paged_decode", "paged_prefill"))
        if settings[-1] == bool(settings[-2]):
            kernels.setdefault(("decode", *decode_key(decode)), decode)
        kernels.setdefault(("prefill", *prefill_key(prefill)), prefill)
    found = list(kernels.values())
    random.Random(0).shuffle(found)
    return found


FEW = [
    Kernel("paged_decode", (256, ("int8", "token"), 8, 128, 128, 30.0, True)),
    Kernel("paged_decode", (64, ("bfloat16", "none"), 16, 32, 128, None, False)),
    Kernel("paged_prefill", (256, ("float8_e5m2", "token"), 12, 256, 128, None, True)),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kernel" in metafunc.fixturenames:
        kernels = product() if metafunc.config.getoption("aot_all") else FEW
        metafunc.parametrize("kernel", kernels, ids=str)


def decode_call(kernel: Kernel) -> tuple[Callable[..., Any], list[Any]]:
    spec = kernel.spec

    def call(q: Any, kv: KVPages, sinks: Any, *ints: Any) -> Any:
        return mosaic_gpu.attend(q, kv, *ints, spec=spec, sinks=sinks, decode_only=True)

    ints = [(), (SEQS, CONTEXT // spec.page_size), (SEQS + 1,), (SEQS,), ()]
    return call, [jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ints]


def prefill_call(kernel: Kernel) -> tuple[Callable[..., Any], list[Any]]:
    spec, tuning = kernel.spec, mosaic_gpu.prefill_tuning(kernel.spec)

    def call(q: Any, kv: KVPages, sinks: Any, *ints: Any) -> Any:
        q = q.astype(spec.compute_dtype)
        return mosaic_gpu_prefill.prefill(q, kv.pages, kv.scales, *ints, sinks, spec=spec, tuning=tuning)

    ints = [(), (SEQS, CONTEXT // spec.page_size), (SEQS + ROWS // 8, 5), (2,)]
    return call, [jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ints]


def reports_of(kernel: Kernel) -> dict[str, nvidia.KernelReport]:
    spec, layout, shape = kernel.spec, kernel.layout, jax.ShapeDtypeStruct
    scales = layout.scales_shape(PAGES)
    pages = shape(layout.pages_shape(PAGES), jnp.dtype(layout.dtype))
    kv = KVPages(pages, None if scales is None else shape(scales, jnp.float32))
    H = KV_HEADS * spec.group
    call, ints = (decode_call if kernel.name == "paged_decode" else prefill_call)(kernel)
    q = shape((SEQS if kernel.name == "paged_decode" else ROWS, H, layout.head_dim), jnp.bfloat16)
    sinks = shape((H,), jnp.float32) if spec.has_sinks else None
    _, reports = nvidia.compile_for_h100(call, q, kv, sinks, *ints)
    return {report.name: report for report in reports}


def test_compiles_without_spills(kernel: Kernel) -> None:
    reports = reports_of(kernel)
    for report in reports.values():
        assert (report.stack_bytes, report.spill_bytes) == (0, 0), report
    report = reports[kernel.name]
    assert report.wgmma > 0
    assert report.tensor_copies > 0
    assert not report.serialized
    if kernel.name == "paged_prefill":
        assert report.registers <= 168  # 65,536 over 384 threads; the roles then share them out among themselves
    elif kernel.spec.group <= 8:
        assert report.registers <= 96, report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("paged_decode", (128, POOLS[1], 3, 128, 300, 30.0, True), (128, POOLS[1], 8, 512, 600, 30.0, True)),
        ("paged_prefill", (128, POOLS[0], 10, 128, 300, None, False), (128, POOLS[0], 14, 512, 4096, None, False)),
    ],
)
def test_equal_keys_are_equal_kernels(name: str, one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """But for numbers in them: what the compiler says of the one holds of the other."""
    kernels = [Kernel(name, settings) for settings in (one, other)]
    key = decode_key if name == "paged_decode" else prefill_key
    assert key(kernels[0]) == key(kernels[1])
    first, second = (reports_of(kernel)[name] for kernel in kernels)
    assert first == second


def test_the_product_is_what_the_settings_span() -> None:
    decodes = [kernel for kernel in product() if kernel.name == "paged_decode"]
    by_page_and_window = (
        2 + 3 + 4 + 4
    )  # pages of 16, 32, 64 and more; no window, or one with copies of 16, 32 or 64 keys
    assert len(decodes) == 2 * 3 * len(POOLS) * by_page_and_window * 2
    prefills = len(product()) - len(decodes)
    of_128_keys = 8 * (
        len(POOLS) * 8 + 1
    )  # head_dim 64, and plain bfloat16 at 128: a page of 256 is another kernel there
    assert prefills == 8 * 4 * 3 * len(POOLS) * 8 + of_128_keys
