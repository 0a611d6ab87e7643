"""Tokenizers built from GGUF vocabularies, against sentencepiece itself and against cuts worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.byte_tokenizer import BOS, EOS, IM_END, IM_START, VOCAB_SIZE, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.core.errors import ModelLoadError, RequestError
from jaxkv.core.tokenizer_data import TokenizerData, TokenType
from jaxkv.text.byte_level import BYTE_TO_CHAR, piece_to_bytes
from jaxkv.text.pre_tokenizers import pre_rule
from jaxkv.text.tokenizer import Tokenizer

BYTES = byte_tokenizer()
any_text = st.text(st.characters(exclude_categories=["Cs"]))


def words(pre: str, text: str) -> list[str]:
    return [piece_to_bytes(piece).decode() for piece, _ in pre_rule(pre).build().pre_tokenize_str(text)]


def bpe(**changes: Any) -> TokenizerData:
    tokens = [*BYTE_TO_CHAR, "he", "ll", "hell", "hello", "Ġhello", "<end>", "[tool]"]
    types = [TokenType.NORMAL] * (len(tokens) - 2) + [TokenType.CONTROL, TokenType.USER_DEFINED]
    data = TokenizerData(
        model="gpt2",
        pre="smollm",
        tokens=tokens,
        token_types=[int(kind) for kind in types],
        merges=["h e", "l l", "he ll", "hell o", "Ġ hello"],
        bos_id=261,
        eos_id=261,
    )
    return dataclasses.replace(data, **changes)


# --- byte-level BPE ---------------------------------------------------------------------------------------------------


@given(text=any_text)
def test_bytes_round_trip(text: str) -> None:
    ids = BYTES.encode(text)
    assert ids == list(text.encode()) or "<" in text
    assert BYTES.decode(ids, skip_special_tokens=False) == text


def test_merges_in_order_and_whole_tokens() -> None:
    tokenizer = Tokenizer.from_gguf_metadata(bpe())
    texts = [tokenizer.token_text(token) for token in tokenizer.encode("hello hello hel<end>[tool]x")]
    assert texts == ["hello", " hello", " ", "he", "l", "<end>", "[tool]", "x"]
    assert tokenizer.special_ids == {261}
    assert tokenizer.decode([261, 262]) == "[tool]"


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("gpt-2", "a  b 123's\n\nx", ["a", " ", " b", " 123", "'s", "\n", "\n", "x"]),
        ("smollm", "in  2024: x1", ["in", "  ", "2", "0", "2", "4", ":", " x", "1"]),
        ("smollm", "½ ٣٤ Ⅷ", ["½", " ", "٣", "٤", " ", "Ⅷ"]),
        ("llama-bpe", "It'S 12345.\n\n  go", ["It", "'S", " ", "123", "45", ".\n\n", " ", " go"]),
        ("qwen2", "It'S 123.\n\n  go", ["It", "'S", " ", "1", "2", "3", ".\n\n", " ", " go"]),
        ("tekken", "camelCase HTTPServer 12", ["camel", "Case", " HTTPServer", " ", "1", "2"]),
        ("gpt-4o", "don't 1234 fooBar/\n", ["don't", " ", "123", "4", " foo", "Bar", "/\n"]),
        ("deepseek-coder", "x, y 12;\n", ["x", ",", " y", " ", "1", "2", ";", "\n"]),
        ("default", "a+=12345", ["a", "+=", "123", "45"]),
    ],
)
def test_cuts(pre: str, text: str, cut: list[str]) -> None:
    assert words(pre, text) == cut


def test_word_in_the_vocabulary_is_one_token_where_merges_are_ignored() -> None:
    for pre, expected in (("llama-bpe", ["hello"]), ("smaug-bpe", ["hell", "o"])):
        tokenizer = Tokenizer.from_gguf_metadata(bpe(pre=pre, merges=["h e", "l l", "he ll"], add_bos=False))
        assert [tokenizer.token_text(token) for token in tokenizer.encode("hello")] == expected


def test_qwen2_composes_accents_first() -> None:
    tokenizer = Tokenizer.from_gguf_metadata(bpe(pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, [104]),
        ({"add_bos": True}, [261, 104]),
        ({"add_bos": True, "add_eos": True}, [261, 104, 261]),
        ({"pre": "llama-bpe"}, [261, 104]),
        ({"pre": "llama-bpe", "add_bos": False}, [104]),
    ],
)
def test_what_goes_around_a_text(changes: dict[str, Any], ids: list[int]) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(bpe(**changes))
    assert tokenizer.encode("h") == ids
    assert tokenizer.encode("h", add_special_tokens=False) == [104]


def test_ends_of_turn() -> None:
    assert BYTES.eos_ids == (EOS, IM_END)
    assert BYTES.bos_id == BOS
    assert BYTES.encode("<|im_start|>a<|im_end|>") == [IM_START, 97, IM_END]
    assert Tokenizer.from_gguf_metadata(bpe(eos_id=261, eot_id=262)).eos_ids == (261, 262)
    assert BYTES.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def test_tokens_for_display() -> None:
    assert BYTES.token_text(0x41) == "A"
    assert BYTES.token_text(0xE2) == "bytes:\\xe2"
    assert BYTES.token_text(VOCAB_SIZE) == f"token_id:{VOCAB_SIZE}"
    assert BYTES.token_bytes(-1) == BYTES.token_bytes(VOCAB_SIZE) == b""
    assert BYTES.vocab_size == VOCAB_SIZE


def test_padding_entries_with_equal_texts_keep_their_ids() -> None:
    data = bpe()
    padded = dataclasses.replace(data, tokens=[*data.tokens, "a", "a"], token_types=[*data.token_types, 1, 1])
    tokenizer = Tokenizer.from_gguf_metadata(padded)
    assert tokenizer.encode("a") == [97]
    assert tokenizer.decode([263, 264]) == "aa"
    assert tokenizer.vocab_size == 265


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model": "t5"}, "'t5'"),
        ({"pre": "klingon"}, "'klingon'"),
        ({"tokens": [], "token_types": []}, "tokenizer.ggml.tokens"),
        ({"token_types": [1]}, "tokenizer.ggml.token_type"),
        ({"eos_id": 999}, "999"),
        ({"merges": ["nospace"]}, "'nospace'"),
        ({"merges": ["zz zz"]}, "tokenizer.ggml.merges"),
        ({"add_bos": True, "bos_id": None}, "begin"),
        ({"model": "llama"}, "tokenizer.ggml.scores"),
        ({"model": "llama", "scores": [0.0]}, "tokenizer.ggml.scores"),
    ],
)
def test_what_cannot_be_built_is_named(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.from_gguf_metadata(bpe(**changes))
    assert names in str(caught.value)


# --- SentencePiece ----------------------------------------------------------------------------------------------------

GOLDEN = json.loads(Path(__file__).with_name("sentencepiece_cases.json").read_text("utf-8"))
"""A vocabulary trained by the sentencepiece package, and what that package encodes and decodes with it."""


def sentencepiece(**changes: Any) -> Tokenizer:
    keys = ("tokens", "scores", "token_types", "bos_id", "eos_id", "unk_id")
    return Tokenizer.from_gguf_metadata(
        TokenizerData(**{"model": "llama", "add_bos": False, **{key: GOLDEN[key] for key in keys}, **changes})
    )


def test_sentencepiece_gives_the_same_ids_and_texts() -> None:
    tokenizer = sentencepiece()
    for case in GOLDEN["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
    assert len(GOLDEN["cases"]) > 50


def test_sentencepiece_customs() -> None:
    tokenizer = sentencepiece(add_bos=None)
    assert tokenizer.encode("the")[0] == GOLDEN["bos_id"]
    assert tokenizer.special_ids == {0, 1, 2}
    without_prefix = sentencepiece(add_space_prefix=False)
    assert without_prefix.decode(without_prefix.encode("the")) == "the"
    assert without_prefix.decode(without_prefix.encode(" the")) == " the"


@given(text=any_text)
def test_sentencepiece_round_trip(text: str) -> None:
    tokenizer = sentencepiece()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text or "<" in text or "▁" in text


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\ud800", "fine \udfff"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="lone surrogate") as caught:
        BYTES.encode(text)
    assert caught.value.param == "prompt"


@pytest.mark.filterwarnings("default")
def test_text_that_makes_the_library_panic_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(bpe(pre="llama-bpe", add_bos=False))
    with pytest.raises(RequestError, match="cannot take this text of 11000000 characters"):
        tokenizer.encode(" " * 11_000_000)


@given(text=any_text)
def test_least_tokens_is_a_lower_bound(text: str) -> None:
    for tokenizer in (BYTES, SMALL_BPE, SMALL_SENTENCEPIECE, GAPPY):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))


SMALL_BPE = Tokenizer.from_gguf_metadata(bpe(pre="qwen2"))
SMALL_SENTENCEPIECE = sentencepiece()
GAPPY = Tokenizer.from_gguf_metadata(bpe(tokens=[c if c != "a" else "<gap>" for c in bpe().tokens]))


def test_least_tokens_counts() -> None:
    assert BYTES.least_tokens("x" * 120) == 10  # the longest token, <|im_start|>, has 12 bytes
    assert GAPPY.encode("aaa") == []
    assert GAPPY.least_tokens("a" * 1000) == 0
