"""Limits of sampling parameters: each refused value is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxkv import RequestError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
        ("temperature", True), ("temperature", None), ("top_p", 0), ("top_p", 1.01), ("top_p", -1), ("min_p", -0.1),
        ("min_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("top_k", 2**40), ("n", 0), ("n", 129), ("n", True), ("seed", 1.0),
        ("seed", 2**63), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
        ("repetition_penalty", math.inf), ("logit_bias", {5: 101.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {"5": 1.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)), ("stop", ("",)), ("stop", (5,)), ("stop", ("x",) * 65),
        ("stop", ("x" * 4097,)), ("stop_token_ids", (-1,)), ("stop_token_ids", (1.0,)), ("stop_token_ids", tuple(range(65))),
        ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", 1.0), ("min_tokens", -1), ("logprobs", 21), ("logprobs", -1),
        ("logprobs", True), ("prompt_logprobs", 21),
    ],
)  # fmt: skip
def test_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(RequestError, match="min_tokens 5 is above max_tokens 4") as refused:
        SamplingParams(max_tokens=4, min_tokens=5)
    assert refused.value.param == "min_tokens"


def test_edges_that_are_fine() -> None:
    SamplingParams(
        temperature=1e-300, top_p=1.0, min_p=1.0, top_k=-1, n=128, seed=-(2**63), presence_penalty=-2, frequency_penalty=2,
        repetition_penalty=1e-3, logit_bias={0: -100, 1: 100.0}, stop=("a",) * 64, max_tokens=1, min_tokens=1, logprobs=0,
        prompt_logprobs=20,
    )  # fmt: skip


def test_one_stop_string_is_a_tuple_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
