"""What every backend of ragged paged attention must hold: parity with a dense float64 oracle, whatever lies where it must not read.

Each runs the cases that it affords; the interpreted ones a covering array of the same settings.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.attention_backends import ATTEND, batch_for, check, compare
from fixtures.attention_cases import CASES, Batch, Case, page_edges
from fixtures.attention_coverings import LONG, QUERIES, TPU_SETTINGS, on_hopper, on_tpu

from pallas_kernels.backends import Backend

FP8 = tuple(
    Case(f"{dtype}-{scales}", page_edges(16), group=3, dtype=dtype, scales=scales)
    for dtype in ("float8_e4m3fn", "float8_e5m2")
    for scales in ("token", "static")
)
HOPPER_NAN = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
"""Rows that nobody reads may hold NaN."""
INTERPRETED = (pytest.mark.interpret, pytest.mark.timeout(300), HOPPER_NAN)
MIXED = ((1, 17), (3, 3), (1, 1), (64, 64), (7, 300), (1, 517))
TPU_BLOCKS = {"block_tokens": 256, "query_tile": 32}
# What the covering arrays leave out.
ON_TPU = (
    (Case("decodes-only", ((1, 1), (1, 15), (1, 16), (1, 17), (1, 517)), 4, 2, 128, dtype="bfloat16"), TPU_BLOCKS),
    (Case("default-blocks", ((1, 2049), (130, 2049)), 1, 4, 128, page=128, dtype="bfloat16"), {}),
    (Case("window-over-page-starts", MIXED, 2, 4, 128, window=50, frees=True), TPU_BLOCKS),
    (Case("all-options", MIXED, 2, 4, 128, dtype="bfloat16", sinks=True, soft_cap=5.0, window=20, frees=True), TPU_BLOCKS),
    (Case("all-options-fp8", MIXED, 3, 2, 64, dtype="float8_e4m3fn", scales="static", sinks=True, soft_cap=5.0,
          window=100, frees=True), TPU_BLOCKS),
    (Case("int8-static", MIXED, 2, 4, 128, dtype="int8", scales="static"), TPU_BLOCKS),
    (Case("tiles-of-scales", MIXED, 2, 4, 128, page=384, dtype="float8_e5m2"), {"query_tile": 32}),
    (Case("many-empty-rows", ((1, 40), (5, 40)), 2, 4, 128, dtype="bfloat16", empty=5, padding=9), TPU_BLOCKS),
)  # fmt: skip
DECODES = {"decode_only": True}
ON_HOPPER = (
    *((Case(f"edges-{p}", ((1, 1), (1, p - 1), (1, p), (1, p + 1), (1, 517)), 2, 4, page=p, dtype="bfloat16"), DECODES)
      for p in (16, 64, 128)),
    *((Case(f"group-{g}-{d}", ((1, 130), (1, 65)), 2, g, d, 64, "bfloat16"), DECODES)
      for g, d in ((1, 64), (2, 128), (7, 64), (8, 256), (16, 64))),
    (Case("mixed", ((1, 70), (3, 3), (0, 40), (64, 64), (1, 1), (130, 517), (7, 129)), 2, 4, dtype="bfloat16"), {}),
    *((Case(f"prefill-group-{g}", ((20, 20), (70, 150)), 1, g, dtype="bfloat16"), {}) for g in (1, 7, 8)),
    *((Case(f"prefill-dim-{d}", ((5, 5), (40, 170)), 1, 4, d, 32, "bfloat16"), {}) for d in (128, 256)),
    *((Case(f"all-options-{w}", ((1, 300), (40, 300), (1, 3)), 1, 4, dtype="bfloat16", window=w, soft_cap=20.0,
            sinks=True), {}) for w in (4, 100)),
    *((Case(f"{t}-{s}", ((1, 130), (33, 150), (1, 17)), 1, 4, dtype=t, scales=s), {})
      for t, s in (("float8_e4m3fn", "static"), ("float8_e5m2", "token"))),
    (Case("long-256", ((1, 2049), (130, 1300), (3, 3)), 1, 7, 256, 128, "bfloat16", window=1024), {}),
    *((Case(f"long-int8-{w}", ((130, 2049), (1, 2049), (7, 7)), 1, 4, dtype="int8", scales=s, window=w), {})
      for w, s in ((4, "static"), (1024, "token"))),
    # At head_dim 128 prefill takes tiles of 128 keys for plain attention, of 64 for all else.
    (Case("smaller-tiles", ((1, 130), (20, 150)), 1, 2, 128, 64, "bfloat16", window=40, soft_cap=2.0, sinks=True),
     {"num_sms": 1}),
    # The last tile of q moves back when it would pass the end: neighbours keep their own results.
    (Case("partial-tiles", ((17, 17), (33, 90), (2, 200)), 1, 4, dtype="bfloat16", padding=0), {}),
    (Case("few-rows", ((2, 33),), 1, 1, dtype="bfloat16", padding=0), {}),
)  # fmt: skip


def _suite() -> list[Any]:
    here = [
        pytest.param(backend, case, {}, seed, id=f"{backend}-{case.name}-{seed}")
        for backend, cases in (("reference", (*CASES, *FP8)), ("cpu_native", CASES))
        for case in cases
        for seed in ((0, 1) if backend == "cpu_native" else (0,))
    ]
    interpreted = [
        pytest.param(backend, case, tuning, seed, id=f"{backend}-{case.name}", marks=INTERPRETED)
        for backend, cases in (("mosaic_tpu", [*on_tpu(), *ON_TPU]), ("mosaic_gpu", [*on_hopper(), *ON_HOPPER]))
        for seed, (case, tuning) in enumerate(cases)
    ]
    return here + interpreted


@pytest.mark.parametrize(("backend", "case", "tuning", "seed"), _suite())
def test_equals_the_oracle(backend: Backend, case: Case, tuning: dict[str, Any], seed: int) -> None:
    check(backend, case, seed, **tuning)


EVERYTHING = Case("everything", ((1, 40), (5, 70)), 1, 2, dtype="int8", window=30, soft_cap=2.0, sinks=True)
MISTAKES = (
    "wrong window", "no window", "wrong soft cap", "no soft cap", "wrong scale", "wrong sinks", "no sinks", "wrong layer",
    "a key too few", "a key too many", "wrong page", "wrong scales",
)  # fmt: skip


def _mistakes(batch: Batch) -> dict[str, dict[str, Any]]:
    """Arguments that are wrong in one thing."""
    assert batch.sinks is not None
    assert batch.kv.scales is not None
    changes = (
        {"sliding_window": 29}, {"sliding_window": None}, {"logit_soft_cap": 3.0}, {"logit_soft_cap": None},
        {"scale": 1.2 * batch.case.head_dim**-0.5}, {"sinks": batch.sinks[::-1]}, {"sinks": None}, {"layer": jnp.int32(0)},
        {"kv_lens": batch.kv_lens - 1}, {"kv_lens": batch.kv_lens + 1},
        {"page_table": batch.page_table.at[1, 3].set(batch.page_table[0, 1])},
        {"kv": batch.kv.replace(scales=batch.kv.scales * 1.1)},
    )  # fmt: skip
    return dict(zip(MISTAKES, changes, strict=True))


EACH_BACKEND = pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=INTERPRETED if name.startswith("mosaic") else ()) for name in ATTEND]
)


@EACH_BACKEND
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(backend: Backend, mistake: str) -> None:
    """A test of the test, for each feature: a call that is wrong in one thing differs from the oracle."""
    batch = batch_for(backend, EVERYTHING)
    assert not compare(backend, batch, **_mistakes(batch)[mistake]).is_right


@EACH_BACKEND
def test_the_call_without_a_mistake_is_right(backend: Backend) -> None:
    check(backend, EVERYTHING)


def test_the_batches_cover_the_lengths() -> None:
    """Context lengths around every page size, with every number of queries that they can have."""
    for page in TPU_SETTINGS["page"]:
        found = {pair for case, _ in on_tpu() if case.page == page for pair in case.lens}
        for context in (1, page - 1, page, page + 1, 517):
            assert not {(q, context) for q in (1, *QUERIES) if q <= context} - found
        assert (1, LONG) in found


def test_what_must_not_be_read_is_poisoned() -> None:
    batch = batch_for("reference", EVERYTHING)
    [used] = np.isfinite(np.asarray(batch.kv.scales)).any(axis=(2, 3, 4))[1:]
    assert used.sum() == 3 + 5
    assert not np.isfinite(np.asarray(batch.kv.scales)[0]).any()
    assert {*np.asarray(batch.page_table)[:, 6:].flat} <= {-1, 2**31 - 1}
