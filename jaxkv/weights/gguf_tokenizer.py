"""GGUF metadata -> TokenizerData."""

from __future__ import annotations

from typing import Any

from jaxkv.core.errors import ModelLoadError
from jaxkv.core.tokenizer_data import TokenizerData
from jaxkv.weights.gguf_header import GGUFHeader
from jaxkv.weights.keys import Keys

_PREFIX = "tokenizer.ggml."


def gguf_tokenizer_data(header: GGUFHeader) -> TokenizerData:
    """The tokenizer of a GGUF file as plain data. Raises ModelLoadError that names the key."""
    own = {key.removeprefix(_PREFIX): value for key, value in header.metadata.items() if key.startswith(_PREFIX)}
    keys = Keys(own, f"{header.path} ({_PREFIX}*)")
    tokens = _list(keys, "tokens", str)
    if not tokens:
        raise ModelLoadError(f"{keys.where} has no tokens: a file without a tokenizer cannot be served")
    model = keys.text_or("model", "")
    if model not in ("gpt2", "llama"):
        raise keys.refuse("model", "supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)")
    pre = keys.text_or("pre", "default")
    types, scores = _list(keys, "token_type", int), _list(keys, "scores", float)
    for name, values in (("token_type", types), ("scores", scores)):
        if values and len(values) != len(tokens):
            raise ModelLoadError(f"{keys.where}: {name} has {len(values)} entries, tokens {len(tokens)}")
    ids = {name: _token_id(keys, f"{name}_token_id", len(tokens)) for name in ("bos", "eos", "eot", "eom", "padding")}
    unknown = _token_id(keys, "unknown_token_id", len(tokens))
    return TokenizerData(
        model=model,
        pre=pre,
        tokens=tokens,
        token_types=types,
        merges=_list(keys, "merges", str),
        scores=scores or None,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        eot_id=ids["eot"],
        eom_id=ids["eom"],
        unk_id=unknown,
        pad_id=ids["padding"],
        add_bos=keys.flag_or("add_bos_token", None),
        add_eos=keys.flag_or("add_eos_token", None),
        add_space_prefix=keys.flag_or("add_space_prefix", True),
        chat_template=_chat_template(header),
    )


def _chat_template(header: GGUFHeader) -> str | None:
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(f"{header.path}: tokenizer.chat_template must be a string")
    return template


def _list(keys: Keys, key: str, kind: type) -> list[Any]:
    value = keys.peek(key)
    if value is None:
        return []
    if not isinstance(value, list) or (value and not isinstance(value[0], kind)):
        raise keys.refuse(key, f"it must be an array of {kind.__name__}")
    return value


def _token_id(keys: Keys, key: str, vocabulary: int) -> int | None:
    token_id = keys.whole_or(key, None, minimum=0)
    if token_id is not None and token_id >= vocabulary:
        raise keys.refuse(key, f"the vocabulary has {vocabulary} tokens")
    return token_id
