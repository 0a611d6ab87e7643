"""Tokenizers read from Hugging Face directories, with the oddities that such directories have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jaxkv.core.errors import ModelLoadError
from jaxkv.text.byte_level import BYTE_TO_CHAR
from jaxkv.text.tokenizer import Tokenizer

CONFIG: dict[str, Any] = {
    "bos_token": {"content": "<s>", "special": True},
    "eos_token": "</s>",
    "chat_template": "from config",
}


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(BYTE_TO_CHAR)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|end|>"])
    backend.add_tokens([AddedToken("é!", normalized=False)])
    return backend


def llama_like() -> tokenizers.Tokenizer:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    vocabulary |= {"▁": 259, "h": 260, "i": 261, "▁h": 262, "▁hi": 263}
    merges = [("▁", "h"), ("▁h", "i")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def saved(path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> Path:
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(CONFIG if config is None else config))
    return path


def test_byte_level_directory(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf_dir(saved(tmp_path, byte_level()), extra_eos_ids=[258, 257])
    assert tokenizer.encode("<s>a</s>") == [256, 97, 257]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (256, (257, 258), {256, 257, 258})
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.decode(tokenizer.encode("héé!😀")) == "héé!😀"
    assert tokenizer.token_bytes(259) == "é!".encode()
    assert tokenizer.chat_template == "from config"
    assert tokenizer.least_tokens("x" * 100) == 15  # <|end|> has 7 bytes


def test_sentencepiece_directory(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_hf_dir(saved(tmp_path, llama_like()))
    assert tokenizer.encode("hi hi\n") == [263, 263, 3 + 10]
    assert tokenizer.decode([263, 263]) == "hi hi"
    assert tokenizer.decode([263], after=[263]) == " hi"
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, [263]),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, [1, 263]),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": True}, [263, 2]),
        ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": None, "add_eos_token": True}, [1, 263, 2]),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True}, [263]),
    ],
)
def test_flags_replace_the_template_where_the_class_does_so(
    tmp_path: Path, config: dict[str, Any], ids: list[int]
) -> None:
    tokenizer = Tokenizer.from_hf_dir(saved(tmp_path, llama_like(), CONFIG | config))
    assert tokenizer.encode("hi") == ids


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_hf_dir(saved(tmp_path, backend))
    assert tokenizer.encode("abcdef") == [97, 98, 99, 100, 101, 102]


def test_special_tokens_map_fills_gaps(tmp_path: Path) -> None:
    saved(tmp_path, byte_level(), {})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    assert Tokenizer.from_hf_dir(tmp_path).eos_ids == (258,)


def test_order_of_chat_templates(tmp_path: Path) -> None:
    saved(
        tmp_path,
        byte_level(),
        {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]},
    )
    assert Tokenizer.from_hf_dir(tmp_path).chat_template == "d"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert Tokenizer.from_hf_dir(tmp_path).chat_template == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.from_hf_dir(tmp_path).chat_template == "from jinja"


def test_no_bound_where_tokens_swallow_white_space(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert Tokenizer.from_hf_dir(saved(tmp_path, backend)).least_tokens("x" * 1000) == 0


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        Tokenizer.from_hf_dir(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[]")]
)
def test_broken_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    saved(tmp_path, byte_level())
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_hf_dir(tmp_path)


def test_unknown_decoder_is_named(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer.from_hf_dir(saved(tmp_path, backend))


def test_flag_without_its_token_is_named(tmp_path: Path) -> None:
    saved(tmp_path, llama_like(), {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})
    with pytest.raises(ModelLoadError, match="add_bos_token"):
        Tokenizer.from_hf_dir(tmp_path)
