"""Text to token ids and back. The one place that says which bytes a token stands for and how they become a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxkv.core.errors import RequestError
from jaxkv.core.tokenizer_data import TokenizerData
from jaxkv.text.encodable import check_encodable
from jaxkv.text.gguf_tokenizer import parts_from_gguf
from jaxkv.text.hf_tokenizer import parts_from_hf_dir
from jaxkv.text.tokenizer_parts import TokenizerParts


class Tokenizer:
    """A vocabulary with its rules. Immutable and safe to share between threads; long encodes let other threads run.

    Decoding is defined on bytes: the bytes of the tokens are joined, then read as UTF-8 with U+FFFD for what is
    invalid. A stream (`IncrementalDetokenizer`) follows the same definition, so it gives the same text.

    Attributes:
      vocab_size: one more than the largest id. bos_id: the begin token, if any. eos_ids: every end of a turn.
      special_ids: ids left out of a text by `skip_special_tokens`.
      strips_prefix_space: encoding puts a space before a text, so the text of a first token loses one.
      special_tokens: texts by name (bos_token, eos_token, ...), as chat templates use them.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._pieces = parts.pieces
        self.vocab_size = len(parts.pieces)
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.special_ids = parts.special_ids
        self.strips_prefix_space = parts.strips_prefix_space
        self.chat_template = parts.chat_template
        self.special_tokens = dict(parts.special_tokens)
        # A byte-level vocabulary without a token for some byte leaves that byte out of every text.
        self._droppable = bytes({*range(256)} - {piece[0] for piece in parts.pieces if len(piece) == 1})
        self._max_bytes_per_token = _max_bytes_per_token(parts, self._droppable)

    @classmethod
    def from_hf_dir(cls, path: Path, *, extra_eos_ids: Iterable[int] = ()) -> Tokenizer:
        """Reads tokenizer.json and its companions; extra_eos_ids are those of generation_config.json.

        Raises ModelLoadError naming the file and key at fault.
        """
        return cls(parts_from_hf_dir(path, tuple(extra_eos_ids)))

    @classmethod
    def from_gguf_metadata(cls, data: TokenizerData) -> Tokenizer:
        """Builds from a GGUF file's vocabulary. Raises ModelLoadError naming the key at fault."""
        return cls(parts_from_gguf(data))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Special tokens spelled out in the text are found whether or not others are added.

        Raises RequestError (param "prompt") for text that has no UTF-8 form or that the tokenizer cannot take.
        """
        check_encodable(text, "prompt", "prompt")
        try:
            # The batch call is the one that releases the interpreter lock and keeps no character offsets.
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except BaseException as error:
            # A panic in the library (its regex engine gives up on megabytes of white space) is no Exception.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise RequestError(
                f"the tokenizer cannot take this text of {len(text)} characters: {error}", param="prompt"
            ) from error
        ids: list[int] = encoding.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """A lower bound of `len(encode(text))` that costs next to nothing: to refuse hopeless texts before encoding."""
        if self._max_bytes_per_token is None:
            return 0
        kept = text.encode("utf-8", "replace").translate(None, self._droppable)
        return -(-len(kept) // self._max_bytes_per_token)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, *, after: Sequence[int] = ()) -> str:
        """The text of token ids. after: ids before them, which decide whether a leading space is part of the text."""
        joined = b"".join(self.visible_bytes(token, skip_special_tokens) for token in ids)
        if self.starts_text(after):
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", "replace")

    def visible_bytes(self, token: int, skip_special_tokens: bool) -> bytes:
        """What a token adds to a text: nothing for a skipped special token or an id outside the vocabulary."""
        return b"" if skip_special_tokens and token in self.special_ids else self.token_bytes(token)

    def starts_text(self, before: Sequence[int]) -> bool:
        """Whether a space at the start of what follows `before` is only the one that encoding puts before a text."""
        return self.strips_prefix_space and (not before or before[-1] in self.special_ids)

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes a token stands for; b"" for an id outside the vocabulary."""
        return self._pieces[token] if 0 <= token < self.vocab_size else b""

    def token_text(self, token: int) -> str:
        r"""A token for display, different for different bytes: `bytes:\xe2\x82` for a part of a character."""
        piece = self.token_bytes(token)
        if not piece:
            return f"token_id:{token}"
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _max_bytes_per_token(parts: TokenizerParts, droppable: bytes) -> int | None:
    """Most bytes of a text, `droppable` ones aside, that a token can stand for; None where that is any number."""
    # UTF-8 has no use for C0, C1 and F5..FF, so a vocabulary may do without them.
    every_byte_has_a_token = not set(droppable) - {0xC0, 0xC1, *range(0xF5, 0x100)}
    if parts.max_shrinkage is None or not (parts.byte_level or every_byte_has_a_token):
        return None
    return parts.max_shrinkage * max(len(piece) for piece in parts.pieces)
