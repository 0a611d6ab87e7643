"""The Hopper kernels in the interpreter: every two of pool, head_dim, page size and option meet.

Each batch holds a decode and a prefill, so that both kernels run on each combination.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from fixtures.pairwise import pairwise
from hopper_attention import check
from oracle_dense import random_batch

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.timeout(300),
    # Rows that nobody reads may hold NaN.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 40},
    "cap and sinks": {"logit_soft_cap": 2.0, "with_sinks": True},
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "pool": (
        ("bfloat16", "none"),
        ("int8", "token"),
        ("int8", "static"),
        ("float8_e4m3fn", "token"),
        ("float8_e5m2", "static"),
    ),
    "head_dim": (64, 128, 256),
    "page_size": (16, 64, 128),
    "option": tuple(OPTIONS),
}


def _cases() -> list[dict[str, Any]]:
    """The covering array, with contexts that end around the borders of pages and of tiles of 64 keys."""
    decodes = {page: itertools.cycle((page + 1, 190, page - 1, page)) for page in SETTINGS["page_size"]}
    prefills = itertools.cycle([(20, 150), (3, 193), (33, 129), (7, 128)])
    heads_and_blocks = itertools.cycle([((2, 1), 1), ((1, 2), 2), ((1, 2), 1)])
    cases = []
    for case in pairwise(SETTINGS):
        heads, num_sms = next(heads_and_blocks)
        lens = ((1, next(decodes[case["page_size"]])), next(prefills))
        cases.append(case | {"heads": heads, "num_sms": num_sms, "lens": lens})
    return cases


CASES = _cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_equals_the_oracle(case: dict[str, Any]) -> None:
    (dtype, scales), (K, G) = case["pool"], case["heads"]
    batch = random_batch(
        CASES.index(case), list(case["lens"]), num_kv_heads=K, group=G, head_dim=case["head_dim"],
        page_size=case["page_size"], kv_dtype=dtype, scales=scales,
    )  # fmt: skip
    check(batch, scales, num_sms=case["num_sms"], **OPTIONS[case["option"]])


def test_smaller_tiles_of_16_bit_keys() -> None:
    """At head_dim 128 prefill takes tiles of 128 keys for plain attention, of 64 for all else."""
    batch = random_batch(30, [(1, 130), (20, 150)], num_kv_heads=1, group=2, head_dim=128, page_size=64)
    check(batch, num_sms=1, sliding_window=40, logit_soft_cap=2.0, with_sinks=True)
