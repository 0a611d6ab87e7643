"""Between the scheduler's plan and the device's arrays: chunks and flags of a step, and the log-probabilities it brings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from jaxkv.core.outputs import TokenLogprob
from jaxkv.core.sampling_params import SamplingParams
from jaxkv.runtime.logprobs import Logprobs
from jaxkv.runtime.sampler import SamplingFlags
from jaxkv.runtime.slot_state import uses_history
from jaxkv.runtime.step_batch import FROM_SLOT, Chunk
from jaxkv.scheduling.plan import Entry


def chunk_of(entry: Entry, *, score_prompt: bool) -> Chunk:
    """The rows of one plan entry. score_prompt: the request wants log-probabilities of its prompt.

    A decoding sequence's token is left to the device, which has it in the slot.
    """
    seq = entry.seq
    decodes = entry.num_tokens == 1 and entry.samples and entry.start >= len(seq.prompt_ids)
    targets: Seq[int] = ()
    if score_prompt and entry.start < len(seq.prompt_ids) - 1:
        targets = seq.prompt_ids[entry.start + 1 : entry.end + 1]
    return Chunk(
        tokens=[FROM_SLOT] if decodes else seq.tokens(entry.start, entry.end),
        start=entry.start,
        write_start=entry.write_start,
        block_ids=entry.block_ids,
        slot=entry.slot,
        samples=entry.samples,
        targets=targets,
    )


def flags_of(sampling: Iterable[SamplingParams], *, score_prompt: bool) -> SamplingFlags:
    """What the sampled sequences of a step ask for."""
    params = list(sampling)

    def anyone(asks: Iterable[bool]) -> np.bool_:
        return np.bool_(any(asks))

    random = [p for p in params if not p.greedy]
    return SamplingFlags(
        penalties=anyone(uses_history(p) for p in params),
        bias=anyone(bool(p.logit_bias) for p in params),
        min_tokens=anyone(p.min_tokens > 0 for p in params),
        random=anyone(not p.greedy for p in params),
        top_k=anyone(p.top_k > 0 for p in random),
        top_p=anyone(p.top_p < 1 for p in random),
        logprobs=anyone(p.logprobs is not None for p in params),
        prompt_logprobs=np.bool_(score_prompt),
    )


class HostLogprobs:
    """Log-probabilities of a step, copied to the host once."""

    def __init__(self, logprobs: Logprobs) -> None:
        self._chosen = np.asarray(logprobs.chosen).tolist()
        self._rank = np.asarray(logprobs.rank).tolist()
        self._top_ids = np.asarray(logprobs.top_ids)
        self._top = np.asarray(logprobs.top)

    def at(self, row: int, token: int, k: int) -> TokenLogprob:
        """Of `token`, which the row was asked about, with the k best."""
        best = zip(self._top_ids[row, :k].tolist(), self._top[row, :k].tolist(), strict=True)
        inside = tuple((i, value) for i, value in best if value > -math.inf)  # a small vocabulary has fewer
        return TokenLogprob(token, self._chosen[row], self._rank[row], inside)

    def of_prompt(self, offset: int, positions: range, prompt: Seq[int], k: int) -> list[TokenLogprob] | None:
        """Of the prompt's tokens at `positions`, each asked about by row offset + position; None if one is not finite."""
        rows = [offset + at for at in positions]
        if not np.isfinite(self._top[rows, 0]).all():
            return None
        return [self.at(row, prompt[at], k) for row, at in zip(rows, positions, strict=True)]
