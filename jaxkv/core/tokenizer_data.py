"""A tokenizer as plain data, as a GGUF file holds it: the weights floor reads it, the text floor builds from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum


class TokenType(IntEnum):
    """What a vocabulary entry is (the numbers of GGUF's `tokenizer.ggml.token_type`)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """The vocabulary and the rules of a tokenizer, without any code.

    model: GGUF's `tokenizer.ggml.model`: "gpt2" (byte-level BPE with merges) or "llama" (SentencePiece with scores).
    pre: GGUF's `tokenizer.ggml.pre`, the name of the pre-tokenizer's regular expressions; "default" where it has none.
    tokens: the text of every id as the file spells it (byte-level alphabet in "gpt2", U+2581 for a space in "llama").
    token_types: one `TokenType` number per id; empty = all NORMAL.
    merges: pairs "left right", best first ("gpt2" only). scores: one per id ("llama" only).
    eot_id, eom_id: further ends of a turn, if the file names them.
    add_bos, add_eos: whether encoding with special tokens puts them around the text; None = the file does not say, then
    the custom of its model and pre-tokenizer applies.
    add_space_prefix: whether a space goes before the text ("llama" only).
    """

    model: str
    tokens: list[str]
    pre: str = "default"
    token_types: list[int] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    scores: list[float] | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    eot_id: int | None = None
    eom_id: int | None = None
    unk_id: int | None = None
    pad_id: int | None = None
    add_bos: bool | None = None
    add_eos: bool | None = None
    add_space_prefix: bool = True
    chat_template: str | None = None
