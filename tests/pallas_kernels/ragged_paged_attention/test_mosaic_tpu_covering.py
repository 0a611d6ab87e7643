"""Random ragged batches in the interpreter: every two settings meet, and every query length meets every context length."""

import itertools
from typing import Any

import numpy as np
import pytest
from fixtures.paged_attention_oracle import make_batch, relative_error
from fixtures.pairwise import pairwise
from fixtures.tpu_interpreter import attend

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(300)]

SETTINGS: dict[str, tuple[Any, ...]] = {
    "pool": (
        ("float32", None),
        ("bfloat16", None),
        ("int8", "token"),
        ("float8_e4m3fn", "token"),
        ("float8_e5m2", "static"),
    ),
    "G": (1, 2, 4, 7, 8, 16),
    "D": (64, 128, 256),
    "page": (16, 32, 64, 128),
    "option": ("none", "window 4", "window 1024", "soft cap", "sinks"),
    "dma": ("on_wait", "eager"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "window 4": {"sliding_window": 4},
    "window 1024": {"sliding_window": 1024},
    "soft cap": {"logit_soft_cap": 2.0},
    "sinks": {"with_sinks": True},
}
KV_HEADS = {1: 3, 2: 2, 4: 2, 7: 1, 8: 1, 16: 1}
QUERIES = (3, 7, 64, 130)
LONG = 2049
# A result is rounded once to the dtype of the queries. Stored 8-bit numbers are exact in bfloat16: they add nothing.
BOUND = {"float32": 1e-5}


def _cases() -> list[dict[str, Any]]:
    """The covering array, each case with a decode and two prefills that take turns among the lengths of its page size."""
    decodes, prefills = {}, {}
    for number, page in enumerate(SETTINGS["page"]):
        contexts = (1, page - 1, page, page + 1, 517)
        decodes[page] = itertools.cycle((1, context) for context in (LONG, *contexts))
        pairs = [(q, context) for context in contexts for q in QUERIES if q <= context]
        prefills[page] = itertools.cycle([(QUERIES[number], LONG), *pairs])
    cases = []
    for case in pairwise(SETTINGS):
        page = case["page"]
        lengths = [next(decodes[page]), next(prefills[page]), next(prefills[page])]
        if case["option"] == "window 1024" and max(lengths, key=lambda pair: pair[1])[1] < LONG:
            lengths.append((1, LONG))
        cases.append(case | {"lengths": tuple(lengths)})
    return cases


CASES = _cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_equals_the_oracle(case: dict[str, Any]) -> None:
    (dtype, scales), G = case["pool"], case["G"]
    batch = make_batch(
        list(case["lengths"]), K=KV_HEADS[G], G=G, D=case["D"], page=case["page"], dtype=dtype, scales=scales,
        seed=CASES.index(case), **OPTIONS[case["option"]],
    )  # fmt: skip
    got = attend(batch, dma=case["dma"], block_tokens=256, query_tile=32)
    assert np.isfinite(got).all(), "padding rows must be finite too"
    assert relative_error(got[: len(batch.expected)], batch.expected) < BOUND.get(dtype, 1e-2)


def test_the_batches_cover_the_lengths() -> None:
    """Context lengths around every page size, with every number of queries that they can have."""
    for page in SETTINGS["page"]:
        found = {pair for case in CASES if case["page"] == page for pair in case["lengths"]}
        for context in (1, page - 1, page, page + 1, 517):
            missing = {(q, context) for q in (1, *QUERIES) if q <= context} - found
            assert not missing
        assert (1, LONG) in found
