from __future__ import annotations

import pytest
from scheduling.kv_simulator import make_sequence


def test_tokens_are_prompt_then_output() -> None:
    seq = make_sequence("a", [1, 2, 3])
    seq.output_ids += [4, 5]
    everything = [1, 2, 3, 4, 5]
    for start in range(6):
        for stop in range(start, 6):
            assert seq.tokens(start, stop) == everything[start:stop]
    assert (seq.num_tokens, seq.num_uncomputed) == (5, 5)


@pytest.mark.parametrize(
    ("sampled", "kept", "reason", "stop_token"),
    [
        ([1], [1], None, None),
        ([1, 9, 2], [1, 9], "stop", 9),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4], "length", None),
        ([1, 2, 3, 9, 5], [1, 2, 3, 9], "stop", 9),
    ],
)
def test_accept_ends_at_the_first_reason(
    sampled: list[int], kept: list[int], reason: str | None, stop_token: int | None
) -> None:
    seq = make_sequence("a", [1], max_tokens=4, stop_ids=frozenset({8, 9}))
    assert seq.accept(sampled) == reason
    assert (seq.output_ids, seq.stop_token) == (kept, stop_token)


def test_a_stop_id_before_min_tokens_outputs_does_not_end_it() -> None:
    seq = make_sequence("a", [1], max_tokens=6, stop_ids=frozenset({9}), min_tokens=2)
    assert seq.accept([9]) is None
    assert seq.accept([9]) is None
    assert seq.accept([9]) == "stop"
    assert seq.output_ids == [9, 9, 9]


@pytest.mark.parametrize(("max_tokens", "peak"), [(0, 5), (1, 5), (2, 6), (10, 14)])
def test_the_last_output_token_needs_no_place(max_tokens: int, peak: int) -> None:
    assert make_sequence("a", [1] * 5, max_tokens=max_tokens).peak_tokens == peak
