"""Builds a tokenizer from the vocabulary in a GGUF file: byte-level BPE ("gpt2") or SentencePiece BPE ("llama")."""

from __future__ import annotations

import itertools
import re

import tokenizers
from tokenizers import AddedToken
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace
from tokenizers.normalizers import Sequence as NormalizerSequence
from tokenizers.processors import TemplateProcessing

from jaxkv.core.errors import ModelLoadError
from jaxkv.core.tokenizer_data import TokenizerData, TokenType
from jaxkv.text.byte_level import piece_to_bytes
from jaxkv.text.pre_tokenizers import pre_rule
from jaxkv.text.tokenizer_parts import TokenizerParts

SPACE_MARK = "\u2581"
NFC_MAX_SHRINKAGE = 3
"""Canonical decomposition makes UTF-8 at most three times as long, so composition at most three times as short."""

_ENDS_OF_TURN = frozenset(
    [
        "</s>",
        "<eos>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endofturn|>",
        "<|end_of_turn|>",
        "<EOT>",
        "<|EOT|>",
        "<｜end▁of▁sentence｜>",
    ]
)
"""Control tokens after which no model of this kind goes on; files name one end only and leave the others out."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def parts_from_gguf(data: TokenizerData) -> TokenizerParts:
    """Raises ModelLoadError naming the metadata key that is unknown, missing or inconsistent."""
    if data.model not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"tokenizer.ggml.model is {data.model!r}: gpt2 (byte-level BPE) and llama (SentencePiece) can be read; "
            "load the model from its Hugging Face directory"
        )
    types = _checked_types(data)
    if data.model == "gpt2":
        backend, add_bos, shrinkage = _byte_level_bpe(data)
    else:
        backend, add_bos, shrinkage = _sentencepiece_bpe(data, types), True, 1
    _add_whole_tokens(backend, data, types)
    add_bos = add_bos if data.add_bos is None else data.add_bos
    _add_template(backend, data, data.bos_id if add_bos else None, data.eos_id if data.add_eos else None, add_bos)
    return TokenizerParts(
        backend=backend,
        pieces=[_bytes_of(data.model, token, kind) for token, kind in zip(data.tokens, types, strict=True)],
        special_ids=frozenset(i for i, kind in enumerate(types) if kind in (TokenType.CONTROL, TokenType.UNKNOWN)),
        bos_id=data.bos_id,
        eos_ids=_ends_of_turn(data, types),
        byte_level=data.model == "gpt2",
        strips_prefix_space=data.model == "llama" and data.add_space_prefix,
        chat_template=data.chat_template,
        max_shrinkage=shrinkage,
        special_tokens=_named_tokens(data),
    )


def _checked_types(data: TokenizerData) -> list[int]:
    count = len(data.tokens)
    if count == 0:
        raise ModelLoadError("tokenizer.ggml.tokens is empty: the file holds no vocabulary")
    if data.token_types and len(data.token_types) != count:
        raise ModelLoadError(f"tokenizer.ggml.token_type has {len(data.token_types)} entries for {count} tokens")
    for key in ("bos", "eos", "eot", "eom", "unk", "pad"):
        token = getattr(data, f"{key}_id")
        if token is not None and not 0 <= token < count:
            raise ModelLoadError(f"the {key} token id is {token}, outside the vocabulary of {count} tokens")
    return data.token_types or [int(TokenType.NORMAL)] * count


def _byte_level_bpe(data: TokenizerData) -> tuple[tokenizers.Tokenizer, bool, int]:
    rule = pre_rule(data.pre)
    merges = [_merge_pair(merge) for merge in data.merges]
    backend = _bpe(data.tokens, merges, ignore_merges=rule.ignore_merges)
    backend.pre_tokenizer = rule.build()
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer()
    return backend, rule.add_bos, NFC_MAX_SHRINKAGE if rule.normalizer is not None else 1


def _merge_pair(merge: str) -> tuple[str, str]:
    # The first character belongs to the left half even if it is a space.
    cut = merge.find(" ", 1)
    if cut < 0:
        raise ModelLoadError(f"tokenizer.ggml.merges holds {merge!r}: an entry is two tokens with a space between")
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece_bpe(data: TokenizerData, types: list[int]) -> tokenizers.Tokenizer:
    scores = data.scores
    if scores is None or len(scores) != len(data.tokens):
        found = "no" if scores is None else str(len(scores))
        raise ModelLoadError(f"tokenizer.ggml.scores has {found} entries for {len(data.tokens)} tokens")
    unknown = data.tokens[data.unk_id] if data.unk_id is not None else None
    merges = _merges_from_scores(data.tokens, scores, types)
    backend = _bpe(data.tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    space = Replace(" ", SPACE_MARK)
    backend.normalizer = NormalizerSequence([Prepend(SPACE_MARK), space]) if data.add_space_prefix else space
    return backend


def _merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, those of the best scored token first."""
    normal = {token: i for i, token in enumerate(tokens) if types[i] == TokenType.NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                found.append((-scores[index], normal[left], normal[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: object) -> tokenizers.Tokenizer:
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        # Padding entries may repeat a text; the first id is the one that encoding gives.
        vocabulary.setdefault(token, index)
    try:
        return tokenizers.Tokenizer(BPE(vocabulary, merges, **options))
    except Exception as error:
        raise ModelLoadError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error


def _add_whole_tokens(backend: tokenizers.Tokenizer, data: TokenizerData, types: list[int]) -> None:
    """Control and user-defined tokens are found in a text as a whole, before anything else cuts it."""
    special, plain = [], []
    for token, kind in zip(data.tokens, types, strict=True):
        if token and kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, normalized=False, special=True))
        elif token and kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _add_template(
    backend: tokenizers.Tokenizer, data: TokenizerData, first: int | None, last: int | None, add_bos: bool
) -> None:
    if (add_bos and first is None) or (data.add_eos and last is None):
        raise ModelLoadError("the tokenizer is to add a begin or end token, but the file names no id for it")
    set_template(backend, *(None if i is None else (data.tokens[i], i) for i in (first, last)))


def set_template(backend: tokenizers.Tokenizer, first: tuple[str, int] | None, last: tuple[str, int] | None) -> None:
    """Makes encoding with special tokens put `first` and `last` (text, id) around the text."""
    around = [token for token in (first, last) if token is not None]
    if around:
        single = [*([first[0]] if first else []), "$A", *([last[0]] if last else [])]
        backend.post_processor = TemplateProcessing(single=single, special_tokens=around)


def _bytes_of(model: str, token: str, kind: int) -> bytes:
    if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
        return token.encode("utf-8")
    if model == "gpt2":
        return piece_to_bytes(token)
    return sentencepiece_bytes(token, may_be_byte=kind == TokenType.BYTE)


def sentencepiece_bytes(token: str, *, may_be_byte: bool) -> bytes:
    """The bytes of a SentencePiece entry: `<0x0A>` is one byte where the vocabulary has byte tokens."""
    byte = _BYTE_TOKEN.fullmatch(token) if may_be_byte else None
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE_MARK, " ").encode("utf-8")


def _ends_of_turn(data: TokenizerData, types: list[int]) -> tuple[int, ...]:
    named = [i for i in (data.eos_id, data.eot_id, data.eom_id) if i is not None]
    known = [i for i, token in enumerate(data.tokens) if types[i] == TokenType.CONTROL and token in _ENDS_OF_TURN]
    return tuple(dict.fromkeys(itertools.chain(named, known)))


def _named_tokens(data: TokenizerData) -> dict[str, str]:
    ids = {"bos_token": data.bos_id, "eos_token": data.eos_id, "unk_token": data.unk_id, "pad_token": data.pad_id}
    return {name: data.tokens[i] for name, i in ids.items() if i is not None}
