"""Choices of /v1/completions: text, legacy log-probabilities, and the echoed prompt before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxkv.core.outputs import CompletionDelta, RequestDelta, TokenLogprob
from server.answer import Part
from server.logprobs import CompletionLogprobWriter, echoed_logprobs, empty_completion_logprobs, prompt_logprobs
from server.protocol.completions import CompletionRequest

if TYPE_CHECKING:
    from jaxkv import Tokenizer
    from jaxkv.engine.request import Request


class CompletionWriter:
    """Writes the parts of a completions answer. Choices are numbered prompt by prompt, n for each."""

    id_prefix = "cmpl"
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, body: CompletionRequest, requests: Sequence[Request], tokenizer: Tokenizer) -> None:
        self._body = body
        self._requests = requests
        self._tokenizer = tokenizer
        self._skip_special = requests[0].params.skip_special_tokens
        self._prompt_entries: dict[int, Sequence[TokenLogprob | None]] = {}
        self._logprobs: dict[int, CompletionLogprobWriter] = {}
        self._opened: set[int] = set()

    def parts(self, position: int, delta: RequestDelta) -> list[Part]:
        if delta.prompt_logprobs is not None:
            self._prompt_entries[position] = delta.prompt_logprobs
        written = [self._part(position, gain) for gain in delta.choices]
        return [part for part in written if part is not None]

    def _part(self, position: int, gain: CompletionDelta) -> Part | None:
        index = position * self._requests[position].params.n + gain.index
        part: Part = {
            "index": index,
            "text": gain.text,
            "logprobs": None,
            "finish_reason": gain.finish_reason,
            "stop_reason": gain.stop_reason,
        }
        opening = self._open(position, index, part) if index not in self._opened else False
        if self._body.logprobs is not None:
            gained = self._logprobs[index].write(gain.logprobs)
            part["logprobs"] = _joined([part["logprobs"], gained]) if part["logprobs"] else gained
        worth_sending = (
            opening or gain.text or gain.finish_reason or (self._body.logprobs is not None and gain.logprobs)
        )
        return part if worth_sending else None

    def _open(self, position: int, index: int, part: Part) -> bool:
        """Adds to a choice's first part what stands before the answer; True if there was anything."""
        self._opened.add(index)
        request = self._requests[position]
        text = ""
        entries = self._prompt_entries.get(position)
        if self._body.echo:
            text = self._prompt_text(request)
            part["text"] = text + part["text"]
        if self._body.logprobs is not None:
            self._logprobs[index] = CompletionLogprobWriter(
                self._tokenizer,
                start=len(text),
                after=request.prompt_token_ids,
                num_top=self._body.logprobs,
                skip_special_tokens=self._skip_special,
            )
            if self._body.echo and entries is not None:
                part["logprobs"] = echoed_logprobs(
                    self._tokenizer, request.prompt_token_ids, entries, text, self._body.logprobs
                )
        if self._body.prompt_logprobs is not None and entries is not None:
            part["prompt_logprobs"] = prompt_logprobs(self._tokenizer, entries, self._body.prompt_logprobs)
        return bool(text) or "prompt_logprobs" in part

    def _prompt_text(self, request: Request) -> str:
        if request.prompt is not None:
            return request.prompt
        return self._tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=self._skip_special)

    def whole(self, parts: list[Part]) -> list[Part]:
        by_index: dict[int, list[Part]] = {}
        for part in parts:
            by_index.setdefault(part["index"], []).append(part)
        return [_fold(by_index[index]) for index in sorted(by_index)]

    def extras(self) -> dict[str, Any]:
        return {}


def _fold(parts: list[Part]) -> Part:
    logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    return {
        # The first part may carry prompt_logprobs, the last one carries the reasons.
        **parts[0],
        "text": "".join(part["text"] for part in parts),
        "logprobs": _joined(logprobs) if logprobs else None,
        "finish_reason": parts[-1]["finish_reason"],
        "stop_reason": parts[-1]["stop_reason"],
    }


def _joined(rows: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    joined = empty_completion_logprobs()
    for row in rows:
        for name, values in row.items():
            joined[name] += values
    return joined
