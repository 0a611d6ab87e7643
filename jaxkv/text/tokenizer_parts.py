"""What a tokenizer is made of, wherever it was read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Everything `Tokenizer` needs.

    pieces: for every id the exact bytes it stands for (b"" for an id in a gap of the vocabulary).
    special_ids: ids that `skip_special_tokens` leaves out of a text.
    byte_level: every token is a run of bytes; else (SentencePiece) a run of characters, or a byte.
    strips_prefix_space: encoding puts a space before a text, so decoding takes one away.
    max_shrinkage: the normalizer makes a text shorter (in bytes) by at most this factor; None = by any factor.
    special_tokens: texts by name (bos_token, eos_token, ...), as chat templates use them.
    """

    backend: tokenizers.Tokenizer
    pieces: Sequence[bytes]
    special_ids: frozenset[int]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    byte_level: bool
    strips_prefix_space: bool
    chat_template: str | None
    max_shrinkage: int | None = 1
    special_tokens: dict[str, str] = field(default_factory=dict)
