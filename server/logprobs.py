"""Log-probabilities in the three shapes that clients know: completions, chat, and prompt_logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from jaxkv.core.outputs import TokenLogprob

if TYPE_CHECKING:
    from jaxkv import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def finite(logprob: float) -> float:
    # In this order a NaN becomes FLOOR, too.
    return max(FLOOR, logprob)


class CompletionLogprobWriter:
    """The legacy format of one choice, growing token by token.

    start: offset of the first token in the choice's text, in characters; after: the prompt's ids. Offsets count what
    the text shows: a character begins where its first byte's token does, a special token left out takes no room.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, start: int, after: Sequence[int], num_top: int, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = start
        self._strips_space = tokenizer.starts_text(after)

    def write(self, entries: Iterable[TokenLogprob]) -> dict[str, list[Any]]:
        lists = empty_completion_logprobs()
        for entry in entries:
            piece = self._shown_bytes(entry.token_id)
            begin = self._offset + _broken_before(self._decoder, piece)
            _append(lists, self._tokenizer, entry.token_id, entry, begin, self._num_top)
            self._offset += len(self._decoder.decode(piece))
        return lists

    def _shown_bytes(self, token_id: int) -> bytes:
        piece = self._tokenizer.visible_bytes(token_id, self._skip_special)
        if piece and self._strips_space:
            self._strips_space = False
            return piece.removeprefix(b" ")
        return piece


def echoed_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], text: str, num_top: int
) -> dict[str, list[Any]]:
    """The legacy format for an echoed prompt whose text is `text`. The first token has no log-probability."""
    lists = empty_completion_logprobs()
    for token_id, entry, offset in zip(token_ids, entries, prompt_offsets(tokenizer, token_ids, text), strict=True):
        _append(lists, tokenizer, token_id, entry, offset, num_top)
    return lists


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Where in `text` each prompt token begins. Tokens that the text does not show (an added BOS) take no room."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets = []
    at = 0
    for token_id in token_ids:
        raw = tokenizer.token_bytes(token_id)
        offsets.append(at + _broken_before(decoder, raw))
        piece = decoder.decode(raw)
        if text.startswith(piece, at):
            at += len(piece)
        elif piece[:1] == " " and text.startswith(piece[1:], at):
            at += len(piece) - 1  # The space that some tokenizers put before a text.
        elif token_id not in tokenizer.special_ids:
            at = min(at + len(piece), len(text))
    return offsets


def _broken_before(decoder: codecs.IncrementalDecoder, piece: bytes) -> int:
    """How many U+FFFD come before `piece`: those of a character that was begun and that it does not go on with."""
    begun, _ = decoder.getstate()
    if not begun or not piece:
        return 0
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(begun + piece[:1])
    except UnicodeDecodeError:
        return len(begun.decode("utf-8", "replace"))
    return 0


def empty_completion_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _append(
    lists: dict[str, list[Any]],
    tokenizer: Tokenizer,
    token_id: int,
    entry: TokenLogprob | None,
    offset: int,
    num_top: int,
) -> None:
    lists["tokens"].append(tokenizer.token_text(token_id))
    lists["text_offset"].append(offset)
    if entry is None:
        lists["token_logprobs"].append(None)
        lists["top_logprobs"].append(None)
        return
    best: dict[str, float] = {}
    for other_id, logprob in (*entry.top[:num_top], (token_id, entry.logprob)):
        # Two ids may show the same text: the better one, which comes first, stays.
        best.setdefault(tokenizer.token_text(other_id), finite(logprob))
    lists["token_logprobs"].append(finite(entry.logprob))
    lists["top_logprobs"].append(best)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, list[Any]]:
    """Chat's format: each token with its bytes and its alternatives, best first."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        shown(entry.token_id, entry.logprob) | {"top_logprobs": [shown(*other) for other in entry.top]}
        for entry in entries
    ]
    return {"content": content}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """One object per prompt token, token id to log-probability, rank (1 = best) and text; null for the first token."""

    def shown(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    rows: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            rows.append(None)
            continue
        row = {str(other): shown(other, logprob, rank) for rank, (other, logprob) in enumerate(entry.top[:num_top], 1)}
        row.setdefault(str(entry.token_id), shown(entry.token_id, entry.logprob, entry.rank))
        rows.append(row)
    return rows
