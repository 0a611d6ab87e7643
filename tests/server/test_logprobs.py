"""Where tokens stand in the text, for prompts that a tokenizer shows differently from how they were written."""

from __future__ import annotations

from fixtures.byte_tokenizer import BOS, IM_END, byte_tokenizer

from jaxkv.core.outputs import TokenLogprob
from server.logprobs import CompletionLogprobWriter, finite, prompt_offsets

TOKENIZER = byte_tokenizer()


def offsets(text: str, ids: list[int]) -> list[int]:
    return prompt_offsets(TOKENIZER, ids, text)


def test_a_character_of_several_tokens_begins_where_its_first_one_does() -> None:
    assert offsets("a😀b", list("a😀b".encode())) == [0, 1, 1, 1, 1, 2]


def test_a_special_token_takes_room_only_where_the_text_spells_it_out() -> None:
    assert offsets("ab", [BOS, *b"ab"]) == [0, 0, 1]
    assert offsets("<s>ab", [BOS, *b"ab"]) == [0, 3, 4]


def test_a_space_that_the_tokenizer_added_takes_no_room() -> None:
    assert offsets("ab", list(b" ab")) == [0, 0, 1]


def test_offsets_never_leave_the_text() -> None:
    assert offsets("ab", list(b"xyz")) == [0, 1, 2]


def test_the_answers_tokens_are_counted_in_what_it_shows() -> None:
    writer = CompletionLogprobWriter(TOKENIZER, start=3, after=[97], num_top=0, skip_special_tokens=True)
    ids = [*"é".encode(), IM_END, *b"z"]
    assert writer.write([TokenLogprob(i, -1.0, 1) for i in ids[:2]])["text_offset"] == [3, 3]
    assert writer.write([TokenLogprob(i, -1.0, 1) for i in ids[2:]])["text_offset"] == [4, 4]
    shows = CompletionLogprobWriter(TOKENIZER, start=0, after=[97], num_top=0, skip_special_tokens=False)
    assert shows.write([TokenLogprob(i, -1.0, 1) for i in ids])["text_offset"] == [0, 0, 1, 1 + len("<|im_end|>")]


def test_a_token_begins_after_the_replacement_of_a_broken_character() -> None:
    writer = CompletionLogprobWriter(TOKENIZER, start=0, after=[97], num_top=0, skip_special_tokens=True)
    ids = [0xE2, 0x82, *b"b", 0xC3, 0xC3, 0xA9, 0xFF, *b"c"]
    assert writer.write([TokenLogprob(i, -1.0, 1) for i in ids])["text_offset"] == [0, 0, 1, 2, 3, 3, 4, 5]
    assert bytes(ids).decode("utf-8", "replace") == "\ufffdb\ufffdé\ufffdc"


def test_minus_infinity_and_nan_become_the_floor() -> None:
    assert [finite(x) for x in (-1.5, float("-inf"), float("nan"))] == [-1.5, -9999.0, -9999.0]
