"""A stream of pushes gives the text of a decode at once, for any bytes and any cut."""

from __future__ import annotations

import pytest
from fixtures.byte_tokenizer import BOS, EOS, IM_END, VOCAB_SIZE, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.core.tokenizer_data import TokenizerData, TokenType
from jaxkv.text.detokenizer import IncrementalDetokenizer
from jaxkv.text.tokenizer import Tokenizer

BYTES = byte_tokenizer()
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "é", "日本"]
SENTENCEPIECE = Tokenizer.from_gguf_metadata(
    TokenizerData(
        model="llama",
        tokens=PIECES,
        token_types=[TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256, *[1] * 5],
        scores=[-float(i) for i in range(len(PIECES))],
        bos_id=1,
        eos_id=2,
        unk_id=0,
    )
)
SPACE, HELLO, WORLD = (PIECES.index(piece) for piece in ("▁", "▁Hello", "▁world"))

TEXTS = [
    "plain",
    "👨‍👩‍👧‍👦 family",
    "🇩🇪🏳️‍🌈",
    "สวัสดีชาวโลก",
    "日本語の漢字",
    "e\u0301\u0323 combining",
    "\x00\r\n\t",
    "ﷺ",
]
all_ids = st.integers(min_value=-1, max_value=VOCAB_SIZE + 3)
# Bytes that begin, continue or break long UTF-8 sequences, far more often than chance would have them.
edge_ids = st.sampled_from(
    [0x41, 0x7F, 0x80, 0xBF, 0xC0, 0xC2, 0xE0, 0xA0, 0xED, 0xEF, 0xF0, 0x90, 0xF4, 0x8F, 0xF5, EOS]
)


def stream(tokenizer: Tokenizer, pushes: list[list[int]], skip: bool = True, prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.finish()]


@given(pushes=st.lists(st.lists(all_ids | edge_ids, max_size=6), max_size=12), skip=st.booleans())
def test_joined_stream_equals_decode(pushes: list[list[int]], skip: bool) -> None:
    ids = [token for push in pushes for token in push]
    assert "".join(stream(BYTES, pushes, skip)) == BYTES.decode(ids, skip)


@given(
    pushes=st.lists(st.lists(st.integers(0, len(PIECES)), max_size=4), max_size=8),
    skip=st.booleans(),
    prompt=st.lists(st.integers(0, len(PIECES) - 1), max_size=3).map(tuple),
)
def test_joined_stream_equals_decode_sentencepiece(
    pushes: list[list[int]], skip: bool, prompt: tuple[int, ...]
) -> None:
    ids = [token for push in pushes for token in push]
    assert "".join(stream(SENTENCEPIECE, pushes, skip, prompt)) == SENTENCEPIECE.decode(ids, skip, after=prompt)


@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(TEXTS))
def test_bytes_of_valid_text_never_show_replacement(text: str) -> None:
    pieces = stream(BYTES, [[byte] for byte in text.encode()])
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


def test_incomplete_character_is_kept_back() -> None:
    assert stream(BYTES, [[0xF0], [0x9F], [0x98], [0x80]]) == ["", "", "", "😀", ""]


def test_character_never_completed_shows_at_the_end() -> None:
    assert stream(BYTES, [[0x61, 0xE2, 0x82]]) == ["a", "\ufffd"]


def test_invalid_byte_shows_at_once() -> None:
    assert stream(BYTES, [[0xFF], [0x61]]) == ["\ufffd", "a", ""]


def test_special_tokens_skipped_or_shown() -> None:
    ids = [BOS, 0x68, IM_END, 0x69, EOS]
    assert "".join(stream(BYTES, [ids], skip=True)) == "hi"
    assert "".join(stream(BYTES, [ids], skip=False)) == "<s>h<|im_end|>i</s>"


def test_skipped_special_token_inside_a_character() -> None:
    assert "".join(stream(BYTES, [[0xE2], [EOS], [0x82, 0xAC]])) == "€"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [((), "Hello world"), ((1,), "Hello world"), ((1, HELLO), " Hello world"), ((1, HELLO, 2), "Hello world")],
)
def test_leading_space_belongs_to_the_text_only_after_text(prompt: tuple[int, ...], text: str) -> None:
    assert "".join(stream(SENTENCEPIECE, [[HELLO], [WORLD]], prompt=prompt)) == text


def test_only_one_leading_space_is_taken() -> None:
    assert "".join(stream(SENTENCEPIECE, [[2], [SPACE], [HELLO]])) == " Hello"


def test_byte_fallback_is_joined_into_characters() -> None:
    ids = [PIECES.index(f"<0x{byte:02X}>") for byte in "汉".encode()]
    assert stream(SENTENCEPIECE, [[token] for token in ids]) == ["", "", "汉", ""]
