"""What fits, what is refused, and prompts at every edge."""

from __future__ import annotations

import pytest
from scheduling.kv_simulator import SimulatedDevice, drain, expected_output, make_scheduler, make_sequence

from jaxkv.core.errors import RequestError

MAX_MODEL_LEN = 32


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 12, 16, MAX_MODEL_LEN - 1])
@pytest.mark.parametrize("num_blocks", [8, 40])
def test_prompts_at_the_edges_of_blocks_and_of_the_model(prompt_len: int, num_blocks: int) -> None:
    scheduler = make_scheduler(max_model_len=MAX_MODEL_LEN, num_blocks=num_blocks)
    device = SimulatedDevice(scheduler)
    for run in range(3):  # the second and third find everything cached
        for max_tokens in {1, MAX_MODEL_LEN - prompt_len}:
            seq = make_sequence(f"{run}-{max_tokens}", [3] * prompt_len, max_tokens)
            scheduler.add(seq)
            drain(scheduler, device)
            assert seq.output_ids == expected_output(seq)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "param"),
    [
        (MAX_MODEL_LEN, 1, "prompt"),
        (MAX_MODEL_LEN + 1, 1, "prompt"),
        (MAX_MODEL_LEN + 1, 0, "prompt"),
        (MAX_MODEL_LEN - 1, 2, "max_tokens"),
        (1, MAX_MODEL_LEN, "max_tokens"),
    ],
)
def test_what_exceeds_the_model_is_refused_with_the_numbers(prompt_len: int, max_tokens: int, param: str) -> None:
    scheduler = make_scheduler(max_model_len=MAX_MODEL_LEN)
    with pytest.raises(RequestError) as refused:
        scheduler.add(make_sequence("a", [1] * prompt_len, max_tokens))
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
    for number in (prompt_len, max_tokens, MAX_MODEL_LEN):
        assert str(number) in str(refused.value)
    assert not scheduler.has_unfinished


def test_what_exceeds_the_pool_is_refused_and_what_fits_then_runs() -> None:
    scheduler = make_scheduler(num_blocks=3, max_model_len=64)
    with pytest.raises(
        RequestError, match=r"13 prompt tokens and 1 .* 14 tokens, .*3 blocks of 4 .*12 tokens"
    ) as refused:
        scheduler.add(make_sequence("big", [1] * 13, 1))
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="at most 3 output tokens"):
        scheduler.add(make_sequence("long", [1] * 10, 4))
    fitting = [make_sequence("full", [1] * 12, 1), make_sequence("grows", [1] * 10, 3)]
    for seq in fitting:
        scheduler.add(seq)
    drain(scheduler, SimulatedDevice(scheduler))
    assert [seq.output_ids for seq in fitting] == [expected_output(seq) for seq in fitting]


@pytest.mark.parametrize("prompt_len", range(1, 40))
@pytest.mark.parametrize("num_blocks", [3, 20])
def test_room_for_output_is_the_largest_that_fits(prompt_len: int, num_blocks: int) -> None:
    config = make_scheduler(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN).config
    room = config.room_for_output(prompt_len)
    if room >= 1:
        config.check_fits(prompt_len, room)
    with pytest.raises(RequestError):
        config.check_fits(prompt_len, max(room, 0) + 1)


def test_scoring_may_fill_the_model() -> None:
    config = make_scheduler(max_model_len=MAX_MODEL_LEN).config
    config.check_fits(MAX_MODEL_LEN, 0)


def test_empty_prompts_and_negative_lengths_are_refused() -> None:
    config = make_scheduler().config
    with pytest.raises(RequestError, match="empty") as refused:
        config.check_fits(0, 1)
    assert refused.value.param == "prompt"
    with pytest.raises(RequestError, match="max_tokens is -1"):
        config.check_fits(1, -1)
