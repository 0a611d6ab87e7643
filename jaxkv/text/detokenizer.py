"""Token ids to text as they come, with the same result as decoding all of them at once."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from jaxkv.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The output text of one sequence. Costs time in proportion to the new tokens only.

    The joined results of every `push` and of `finish` equal
    `tokenizer.decode(all ids, skip_special_tokens, after=prompt_ids)`, however the ids are cut into pushes. The bytes
    of a character that is not complete are kept back, so U+FFFD stands only for bytes that no later token can repair.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._drop_space = tokenizer.starts_text(prompt_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that has become certain with these ids; "" while a character is incomplete."""
        data = b"".join(self._tokenizer.visible_bytes(token, self._skip_special_tokens) for token in ids)
        if data and self._drop_space:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left at the end: U+FFFD if the last character was never completed, else ""."""
        return self._utf8.decode(b"", final=True)
