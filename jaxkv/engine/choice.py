"""The host side of one choice of a request: its text as it grows, and why it ended."""

from __future__ import annotations

import logging

from jaxkv.core.outputs import CompletionDelta, FinishReason, TokenLogprob
from jaxkv.engine.request import Request
from jaxkv.scheduling.sequence import Sequence
from jaxkv.text.detokenizer import IncrementalDetokenizer
from jaxkv.text.stop_strings import StopChecker
from jaxkv.text.tokenizer import Tokenizer

log = logging.getLogger("jaxkv")


class Choice:
    """Turns new tokens of one sequence into text deltas, through the stop strings."""

    def __init__(self, request: Request, index: int, sequence: Sequence, tokenizer: Tokenizer) -> None:
        params = request.params
        self.index = index
        self.sequence = sequence
        self.finished = False
        self._own_stop_ids = frozenset(params.stop_token_ids)
        self._show_stop = params.include_stop_str_in_output
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        self._stops = StopChecker(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._seen = 0

    def push(self, token: int, logprob: TokenLogprob | None) -> CompletionDelta:
        """Takes the sequence's newest token. A finish_reason in the delta means that the choice has ended.

        The scheduler has accepted the token already, so `sequence.finish_reason` tells whether it ended by id or length.
        """
        self._seen += 1
        ended = self.sequence.finish_reason
        hidden = ended == "stop" and not self._show_stop
        text = "" if hidden else self._detokenizer.push([token])
        if ended is not None:
            text += self._detokenizer.finish()
        shown = self._through_stops(text, last=ended is not None)
        reason: FinishReason | None = ended
        stop_reason: int | str | None = None
        if self._stops.stopped_by is not None:
            reason, stop_reason = "stop", self._stops.stopped_by
        elif ended == "stop" and token in self._own_stop_ids:
            stop_reason = token
        return self._delta(shown, (token,), (logprob,) if logprob else (), reason, stop_reason)

    def end(self, reason: FinishReason, error: str | None = None) -> CompletionDelta:
        """Ends the choice from outside: its held-back text comes out."""
        try:
            text = self._through_stops(self._detokenizer.finish(), last=True)
        except Exception:  # whatever made it end may have hit the text as well: it must end all the same
            log.exception("the held-back text of a choice is lost")
            text = ""
        return self._delta(text, (), (), reason, None, error)

    def _through_stops(self, text: str, *, last: bool) -> str:
        """Text that may be shown. Stop strings are looked for from the token on that makes min_tokens full."""
        shown = text if self._seen < self._min_tokens else self._stops.push(text)[0]
        return shown + self._stops.finish() if last else shown

    def _delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        reason: FinishReason | None,
        stop_reason: int | str | None,
        error: str | None = None,
    ) -> CompletionDelta:
        self.finished = reason is not None
        return CompletionDelta(self.index, text, token_ids, logprobs, reason, stop_reason, error)
