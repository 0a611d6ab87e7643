"""The TPU attention kernels compile for chips that are not here, fit their memory and leave the pool where it is."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from fixtures.pairwise import pairwise
from fixtures.tpu_ahead_of_time import compile_on, mesh_of, needs_libtpu
from jax.sharding import PartitionSpec as P

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention import mosaic_tpu

pytestmark = [pytest.mark.aot, needs_libtpu, pytest.mark.timeout(300)]

LAYERS, SEQS, CONTEXT = 2, 64, 2048


SETTINGS: dict[str, tuple[Any, ...]] = {
    "chip": ("v5e", "v6e", "v5p", "v4"),
    "pool": (
        ("bfloat16", None), ("float32", None), ("int8", "token"), ("float8_e4m3fn", "token"), ("float8_e5m2", "static"),
    ),
    "heads": ((8, 4), (2, 8), (4, 1), (1, 7), (1, 16)),  # KV heads and queries for each
    "D": (64, 128, 256),
    "page": (16, 32, 64, 128),
    "option": ("none", "window", "soft cap", "sinks", "all"),
    "tokens": (64, 512),
}  # fmt: skip
MORE: dict[str, tuple[Any, ...]] = {
    "pool": (*SETTINGS["pool"], ("int8", "static"), ("float8_e4m3fn", "static"), ("float8_e5m2", "token")),
    "heads": (*SETTINGS["heads"], (8, 8), (3, 3), (16, 2)),
    "page": (*SETTINGS["page"], 256),
    # Options are independent of each other, and widths of steps differ in the queries of a tile only.
    "option": ("none", "all"),
    "tokens": (512,),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"sliding_window": 1024},
    "soft cap": {"logit_soft_cap": 30.0},
    "sinks": {"sinks": True},
    "all": {"sliding_window": 1024, "logit_soft_cap": 30.0, "sinks": True},
}


def full_product() -> list[dict[str, Any]]:
    """What an engine may choose on one device, every value with every other: about ten hours, by `make aot-all`."""
    settings = SETTINGS | MORE
    cases = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
    return [case for case in cases if not _refused(case)]


def _refused(case: dict[str, Any]) -> bool:
    """Two blocks of 256 tokens exceed the 16 MiB of VMEM of a v4."""
    return case["chip"] == "v4" and case["heads"][0] * case["D"] >= 4096 and case["pool"][0] == "float32"


def _cases(everything: bool) -> list[dict[str, Any]]:
    sharded = {"chip": "v5e", "D": 128, "option": "none", "tokens": 512, "devices": 4}
    cases = full_product() if everything else pairwise(SETTINGS)
    largest = {
        "chip": "v4",
        "pool": ("float32", None),
        "heads": (8, 8),
        "D": 256,
        "page": 128,
        "option": "all",
        "tokens": 512,
    }
    return [
        *cases,
        largest,
        largest | {"heads": (16, 2), "D": 128},
        largest | {"pool": ("bfloat16", None), "heads": (32, 1), "D": 128, "option": "none"},
        sharded | {"pool": ("bfloat16", None), "heads": (8, 4), "page": 128},
        sharded | {"pool": ("int8", "token"), "heads": (8, 8), "page": 16, "chip": "v6e", "tokens": 64},
        sharded | {"pool": ("float8_e4m3fn", "token"), "heads": (4, 8), "page": 32},
    ]


def _name(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values()).replace(" ", "")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", _cases(metafunc.config.getoption("aot_all")), ids=_name)


def test_compiles_and_reads_the_pool_in_place(case: dict[str, Any]) -> None:
    compile_case(case)


def compile_case(case: dict[str, Any]) -> None:
    """Compiles one call. A kernel that exceeds the chip's memory does not compile; a pool that is copied shows in the text."""
    (dtype, scales), (K, G), D, page = case["pool"], case["heads"], case["D"], case["page"]
    devices = case.get("devices", 1)
    whole = KVLayout(LAYERS, K, D, page, dtype, "token_major", scales or "none", devices)
    layout = dataclasses.replace(whole, num_kv_heads=K // devices, shards=1)
    # At least so many bytes, beside which padded queries are few, and a copy would show.
    num_pages = max(SEQS * CONTEXT // page, devices * 2**27 // whole.bytes_per_page)
    shape = jax.ShapeDtypeStruct
    pool, scales_shape = whole.pages_shape(num_pages), whole.scales_shape(num_pages)
    kv = KVPages(shape(pool, jnp.dtype(dtype)), None if scales_shape is None else shape(scales_shape, jnp.float32))
    ints = [shape(dims, jnp.int32) for dims in ((), (SEQS, CONTEXT // page), (SEQS + 1,), (SEQS,), ())]
    q = shape((case["tokens"], K * G, D), jnp.float32 if dtype == "float32" else jnp.bfloat16)
    options = dict(OPTIONS[case["option"]])
    sinks = shape((K * G,), jnp.float32) if options.pop("sinks", False) else None

    def call(q, kv, layer, page_table, cu_q_lens, kv_lens, num_seqs, sinks):
        return mosaic_tpu.attend(
            q, kv, layer, page_table, cu_q_lens, kv_lens, num_seqs, layout=layout, scale=0.1, sinks=sinks, **options
        )

    heads, scales_heads = P(None, "tensor"), P(None, None, "tensor")
    pool_specs = KVPages(P(None, None, None, "tensor"), None if kv.scales is None else scales_heads)
    specs = (heads, pool_specs, P(), P(), P(), P(), P(), None if sinks is None else P("tensor"))
    compiled = compile_on(mesh_of(case["chip"], devices), call, specs, heads, q, kv, *ints, sinks)
    text = compiled.as_text()
    names = [name for name in ("ragged_paged_attention_decode", "ragged_paged_attention_prefill") if name in text]
    assert len(names) == 2, "both kernels are part of the program"
    pool_bytes = whole.bytes_per_page // devices * num_pages
    assert compiled.memory_analysis().temp_size_in_bytes < pool_bytes // 2, "no copy of the pool"
    for array in jax.tree.leaves(kv):
        local = [n // devices if i == (3 if array is kv.pages else 2) else n for i, n in enumerate(array.shape)]
        dims = ",".join(map(str, local))
        assert not [line for line in text.splitlines() if f"[{dims}]" in line and " copy(" in line]


def test_the_full_product_is_what_the_settings_span() -> None:
    assert len(full_product()) == 4 * 8 * 8 * 3 * 5 * 2 - 5 * 2
