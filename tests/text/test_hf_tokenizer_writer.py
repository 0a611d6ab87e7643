"""A GGUF tokenizer, written as Hugging Face's files, encodes and decodes as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxkv.core.tokenizer_data import TokenizerData, TokenType
from jaxkv.text.byte_level import BYTE_TO_CHAR
from jaxkv.text.hf_tokenizer_writer import copy_hf_tokenizer, write_hf_tokenizer
from jaxkv.text.tokenizer import Tokenizer

SPIECE = json.loads(Path(__file__).with_name("sentencepiece_cases.json").read_text("utf-8"))
TEXTS = ["hello", "hello hello  hel<end>[tool]x", "1234 ½ ٣٤", " É e\u0301\n\n\tx", "", "日本 \U0001f600", " "]


def byte_level(pre: str, add_bos: bool | None) -> TokenizerData:
    tokens = [*BYTE_TO_CHAR, "he", "ll", "hell", "hello", "Ġhello", "<end>", "[tool]", "<|im_end|>"]
    kinds = [TokenType.NORMAL] * 261 + [TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.CONTROL]
    return TokenizerData(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_types=[int(kind) for kind in kinds],
        merges=["h e", "l l", "he ll", "hell o", "Ġ hello"],
        bos_id=261,
        eos_id=261,
        pad_id=263,
        add_bos=add_bos,
        chat_template="{{ messages[0]['content'] }} ü",
    )


def sentencepiece(add_space_prefix: bool) -> TokenizerData:
    keys = ("tokens", "scores", "token_types", "bos_id", "eos_id", "unk_id")
    return TokenizerData(model="llama", add_space_prefix=add_space_prefix, **{key: SPIECE[key] for key in keys})


CASES = {
    "smollm": byte_level("smollm", None),
    "llama3": byte_level("llama-bpe", None),
    "qwen2_with_bos": byte_level("qwen2", True),
    "sentencepiece": sentencepiece(True),
    "sentencepiece_without_prefix": sentencepiece(False),
}


@pytest.mark.parametrize("name", CASES)
def test_the_files_say_the_same(tmp_path: Path, name: str) -> None:
    data = CASES[name]
    before = Tokenizer.from_gguf_metadata(data)
    (tmp_path / "first").mkdir()
    write_hf_tokenizer(data, tmp_path / "first", max_length=77)
    (tmp_path / "copy").mkdir()
    copy_hf_tokenizer(tmp_path / "first", tmp_path / "copy")
    after = Tokenizer.from_hf_dir(tmp_path / "copy", extra_eos_ids=before.eos_ids)
    for text in [*TEXTS, *(case["text"] for case in SPIECE["cases"])]:
        for special in (True, False):
            ids = before.encode(text, special)
            assert after.encode(text, special) == ids, text
        assert after.decode(ids) == before.decode(ids)
        assert after._backend.decode(ids) == before.decode(ids)
    assert [after.token_bytes(i) for i in range(before.vocab_size)] == [
        before.token_bytes(i) for i in range(before.vocab_size)
    ]
    for field in ("vocab_size", "bos_id", "eos_ids", "special_ids", "chat_template", "special_tokens"):
        assert getattr(after, field) == getattr(before, field), field
    assert after.strips_prefix_space == before.strips_prefix_space
    assert json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text("utf-8"))["model_max_length"] == 77
