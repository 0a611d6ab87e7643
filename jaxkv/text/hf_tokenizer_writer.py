"""Writes a tokenizer as Hugging Face's files: tokenizer.json with its rules, tokenizer_config.json with the chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers.decoders import ByteFallback, ByteLevel, Decoder, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as DecoderSequence

from jaxkv.core.tokenizer_data import TokenizerData
from jaxkv.text.gguf_tokenizer import SPACE_MARK, parts_from_gguf
from jaxkv.text.tokenizer_parts import TokenizerParts

_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*")


def write_hf_tokenizer(data: TokenizerData, directory: Path, *, max_length: int) -> None:
    """max_length: tokens of context. Entries that repeat another's text, which only pad a vocabulary, have no place in these files.

    Raises ModelLoadError as `parts_from_gguf`, and OSError.
    """
    parts = parts_from_gguf(data)
    parts.backend.decoder = _decoder(parts)
    parts.backend.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        # A class of its own would rebuild the rules of tokenizer.json from what it takes for granted.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **parts.special_tokens,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    if parts.chat_template is not None:
        config["chat_template"] = parts.chat_template
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def copy_hf_tokenizer(source: Path, directory: Path) -> None:
    """Copies the tokenizer's files of one Hugging Face directory into another. Raises OSError."""
    for path in sorted({path for pattern in _FILES for path in source.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, directory / path.name)


def _decoder(parts: TokenizerParts) -> Decoder:
    if parts.byte_level:
        return ByteLevel()
    steps: list[Decoder] = [Replace(SPACE_MARK, " "), ByteFallback(), Fuse()]
    return DecoderSequence([*steps, Strip(" ", 1, 0)] if parts.strips_prefix_space else steps)
