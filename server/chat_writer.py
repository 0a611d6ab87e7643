"""Choices of /v1/chat/completions: messages, or deltas of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxkv.core.outputs import CompletionDelta, RequestDelta, TokenLogprob
from server.answer import Part
from server.logprobs import chat_logprobs, prompt_logprobs
from server.protocol.chat import ChatCompletionRequest

if TYPE_CHECKING:
    from jaxkv import Tokenizer

ROLE = "assistant"


class ChatWriter:
    """Writes the parts of a chat answer."""

    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, body: ChatCompletionRequest, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._prompt_entries: Sequence[TokenLogprob | None] | None = None
        self._opened: set[int] = set()

    def parts(self, _position: int, delta: RequestDelta) -> list[Part]:
        if delta.prompt_logprobs is not None:
            self._prompt_entries = delta.prompt_logprobs
        return [part for gain in delta.choices for part in self._parts(gain)]

    def _parts(self, gain: CompletionDelta) -> list[Part]:
        logprobs = chat_logprobs(self._tokenizer, gain.logprobs) if self._body.logprobs else None
        parts = []
        if gain.index not in self._opened:
            self._opened.add(gain.index)
            parts.append(_part(gain.index, {"role": ROLE, "content": ""}))
        if gain.text or gain.finish_reason or (self._body.logprobs and gain.logprobs):
            content = {"content": gain.text} if gain.text else {}
            parts.append(_part(gain.index, content, logprobs, gain))
        return parts

    def whole(self, parts: list[Part]) -> list[Part]:
        by_index: dict[int, list[Part]] = {}
        for part in parts:
            by_index.setdefault(part["index"], []).append(part)
        return [_fold(by_index[index]) for index in sorted(by_index)]

    def extras(self) -> dict[str, Any]:
        if self._body.prompt_logprobs is None or self._prompt_entries is None:
            return {}
        entries, self._prompt_entries = self._prompt_entries, None
        return {"prompt_logprobs": prompt_logprobs(self._tokenizer, entries, self._body.prompt_logprobs)}


def _part(
    index: int, delta: dict[str, str], logprobs: dict[str, Any] | None = None, gain: CompletionDelta | None = None
) -> Part:
    return {
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": gain.finish_reason if gain else None,
        "stop_reason": gain.stop_reason if gain else None,
    }


def _fold(parts: list[Part]) -> Part:
    entries = [part["logprobs"]["content"] for part in parts if part["logprobs"] is not None]
    return {
        "index": parts[0]["index"],
        "message": {"role": ROLE, "content": "".join(part["delta"].get("content", "") for part in parts)},
        "logprobs": {"content": [entry for row in entries for entry in row]} if entries else None,
        "finish_reason": parts[-1]["finish_reason"],
        "stop_reason": parts[-1]["stop_reason"],
    }
