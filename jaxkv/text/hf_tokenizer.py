"""Reads a tokenizer from a Hugging Face directory: tokenizer.json, tokenizer_config.json, chat_template.jinja, ..."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from jaxkv.core.errors import ModelLoadError
from jaxkv.text.byte_level import piece_to_bytes
from jaxkv.text.gguf_tokenizer import NFC_MAX_SHRINKAGE, SPACE_MARK, sentencepiece_bytes, set_template
from jaxkv.text.tokenizer_parts import TokenizerParts

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")

_REBUILT_TEMPLATES = ("Llama", "CodeLlama", "Gemma", "Cohere")
"""Tokenizer classes for which add_bos_token / add_eos_token replace what tokenizer.json puts around a text."""


def parts_from_hf_dir(path: Path, extra_eos_ids: tuple[int, ...]) -> TokenizerParts:
    """Raises ModelLoadError naming the file and the key at fault."""
    spec = _read_json(path / "tokenizer.json")
    if spec is None:
        raise ModelLoadError(
            f"{path} has no tokenizer.json: save the tokenizer with the `tokenizers` format "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...)) into it"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:
        raise ModelLoadError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
    # Files keep the truncation and padding of their training; a server must cut and fill nothing.
    backend.no_truncation()
    backend.no_padding()
    config = {
        **(_read_json(path / "special_tokens_map.json") or {}),
        **(_read_json(path / "tokenizer_config.json") or {}),
    }
    names = {name: text for name in _TOKEN_NAMES if (text := _token_text(config.get(name))) is not None}
    ids = {name: index for name, text in names.items() if (index := backend.token_to_id(text)) is not None}
    _apply_add_flags(backend, config, names, ids)
    added = backend.get_added_tokens_decoder()
    decoder = _Decoder(path, spec)
    eos = (ids["eos_token"],) if "eos_token" in ids else ()
    return TokenizerParts(
        backend=backend,
        pieces=_pieces(backend, {index: token.content for index, token in added.items()}, decoder),
        special_ids=frozenset(index for index, token in added.items() if token.special),
        bos_id=ids.get("bos_token"),
        eos_ids=tuple(dict.fromkeys((*eos, *extra_eos_ids))),
        byte_level=decoder.byte_level,
        strips_prefix_space=decoder.strips_prefix_space,
        chat_template=_chat_template(path, config),
        max_shrinkage=_max_shrinkage(spec),
        special_tokens=names,
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a {type(content).__name__}: it must be a JSON object")
    return content


def _token_text(value: object) -> str | None:
    """Special tokens are written as a string or as {"content": string, ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _apply_add_flags(
    backend: tokenizers.Tokenizer, config: dict[str, Any], names: dict[str, str], ids: dict[str, int]
) -> None:
    family = str(config.get("tokenizer_class", "")).removesuffix("Fast").removesuffix("Tokenizer")
    flags = (config.get("add_bos_token"), config.get("add_eos_token"))
    if family not in _REBUILT_TEMPLATES or flags == (None, None):
        return
    wanted = []
    for name, flag, default in zip(("bos_token", "eos_token"), flags, (True, False), strict=True):
        flag = default if flag is None else flag
        if flag and name not in ids:
            raise ModelLoadError(f"tokenizer_config.json sets add_{name}, but its {name} is not in the vocabulary")
        wanted.append((names[name], ids[name]) if flag else None)
    set_template(backend, wanted[0], wanted[1])


class _Decoder:
    """What the decoder of tokenizer.json makes of a vocabulary entry."""

    def __init__(self, path: Path, spec: dict[str, Any]) -> None:
        steps = _steps(spec.get("decoder"), "decoders")
        kinds = [step.get("type") for step in steps]
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        replaces_mark = any(
            step.get("type") == "Replace" and step.get("pattern") == {"String": SPACE_MARK} for step in steps
        )
        if not self.byte_level and not replaces_mark and "Metaspace" not in kinds:
            raise ModelLoadError(
                f"{path / 'tokenizer.json'}: the decoder {kinds} is not known here: "
                "byte-level (ByteLevel) and SentencePiece (Metaspace or Replace) vocabularies can be read"
            )
        self.strips_prefix_space = any(_strips_prefix_space(step) for step in steps)

    def piece(self, token: str) -> bytes:
        return piece_to_bytes(token) if self.byte_level else sentencepiece_bytes(token, may_be_byte=self.byte_fallback)


def _strips_prefix_space(step: dict[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        # Older files say add_prefix_space instead of prepend_scheme.
        return bool(step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True))
    return step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0


def _steps(node: dict[str, Any] | None, plural: str) -> list[dict[str, Any]]:
    """A pipeline of tokenizer.json as a flat list: nothing, one step, or a Sequence of them."""
    if node is None:
        return []
    if node.get("type") == "Sequence":
        return [step for child in node.get(plural, []) for step in _steps(child, plural)]
    return [node]


def _pieces(backend: tokenizers.Tokenizer, added: dict[int, str], decoder: _Decoder) -> list[bytes]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        pieces[index] = token.encode("utf-8") if index in added else decoder.piece(token)
    return pieces


def _max_shrinkage(spec: dict[str, Any]) -> int | None:
    """How many times shorter a text can get before its bytes become tokens; None where that is not known."""
    if any(token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens", [])):
        return None
    for step in _steps(spec.get("pre_tokenizer"), "pretokenizers"):
        kept = step.get("type") in ("ByteLevel", "Digits", "Metaspace", "Split") and step.get("behavior") != "Removed"
        if not kept:
            return None
    shrinkage = 1
    for step in _steps(spec.get("normalizer"), "normalizers"):
        if step.get("type") == "NFC":
            shrinkage *= NFC_MAX_SHRINKAGE
        elif step.get("type") != "Prepend" and step.get("pattern") != {"String": " "}:
            return None
    return shrinkage


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja goes before chat_template.json, that before tokenizer_config.json; of several, `default`."""
    if (path / "chat_template.jinja").exists():
        return (path / "chat_template.jinja").read_text("utf-8")
    template = (_read_json(path / "chat_template.json") or {}).get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None
