"""The engine: schedule, run, commit. Everything else (server, notebook, batch job) drives this object."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxkv.cache.budget import MemoryReport
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import RequestError
from jaxkv.core.outputs import FinishReason, RequestDelta, RequestOutput, RequestTimes
from jaxkv.core.sampling_params import SamplingParams
from jaxkv.engine import generation
from jaxkv.engine.admission import Admission
from jaxkv.engine.choice import Choice
from jaxkv.engine.live_request import LiveRequest
from jaxkv.engine.page_view import PageView, view_pages
from jaxkv.engine.request import Prompt, Request
from jaxkv.engine.stats import EngineStats, StepStats
from jaxkv.engine.step_work import HostLogprobs, chunk_of, flags_of
from jaxkv.models.config import ModelConfig
from jaxkv.runtime.runner import Runner
from jaxkv.runtime.step import StepOutput
from jaxkv.scheduling.plan import Entry, StepPlan
from jaxkv.scheduling.scheduler import Scheduler
from jaxkv.scheduling.sequence import Sequence
from jaxkv.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxkv.engine.build import EngineParts

log = logging.getLogger("jaxkv")
_NOT_FINITE = "the model's logits are not finite numbers: its weights or its cache are damaged"
_GOLDEN = 0x9E3779B97F4A7C15
"""Step between the seeds of a request's choices (the 64-bit golden ratio, as in SplitMix64)."""


class Engine:
    """Serves one model. Not thread-safe except for `prepare`: one thread adds, steps and aborts (`AsyncEngine` is that thread).

    Attributes:
      config: as resolved: None is left where it means that nothing is set. model_config: the model's shape.
      generation_config: the model's own sampling defaults. last_step: numbers of the newest step.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.config: EngineConfig = parts.config
        self.model_config: ModelConfig = parts.model_config
        self.tokenizer: Tokenizer = parts.tokenizer
        self.generation_config: dict[str, Any] = parts.generation_config
        self.last_step = StepStats(0, 0, 0, 0.0, 0.0)
        self._memory = parts.memory
        self._runner: Runner = parts.runner
        self._scheduler: Scheduler = parts.scheduler
        self._admission: Admission = parts.admission
        self._live: dict[str, LiveRequest] = {}
        self._owner: dict[str, tuple[LiveRequest, Choice]] = {}
        self._arrivals = itertools.count()
        self._unclaimed: list[RequestDelta] = []
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @classmethod
    def from_pretrained(cls, model: str, **settings: Any) -> Engine:
        """Loads a model and warms it up. model: catalog alias, HF directory or repo id, or .gguf file.

        settings: fields of EngineConfig. Raises ConfigError and ModelLoadError.
        """
        from jaxkv.engine.build import build_engine

        return build_engine(EngineConfig(model=model, **settings))

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.config.model

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live) or bool(self._unclaimed)

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended, oldest first."""
        return tuple(self._live)

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The model's generation_config, with overrides."""
        return SamplingParams(**{**self.generation_config, **overrides})

    # --- requests -------------------------------------------------------------------------------------------------

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> Request:
        """Tokenizes and checks a request; changes nothing, may be called from any thread. Raises RequestError."""
        return self._admission.prepare(
            prompt,
            params or self.default_sampling_params(),
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
        )

    def submit(self, request: Request) -> str:
        """Queues a prepared request and returns its id. Raises RequestError when the id is in use."""
        if request.request_id in self._live:
            raise RequestError(f"request_id {request.request_id!r} is in use: choose another", param="request_id")
        live = LiveRequest(request, RequestTimes(arrival=time.monotonic()))
        self._live[request.request_id] = live
        prompt_ids = list(request.prompt_token_ids)  # all choices read one list
        try:
            for index in range(request.params.n):
                seq = self._new_sequence(request, index, prompt_ids)
                self._scheduler.add(seq)
                live.choices.append(Choice(request, index, seq, self.tokenizer))
                self._owner[seq.seq_id] = (live, live.choices[-1])
        except BaseException:
            self.discard(request.request_id)
            raise
        return request.request_id

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> str:
        """`submit(prepare(...))`: queues a request for the following steps and returns its id."""
        return self.submit(self.prepare(prompt, params, **options))

    def abort(self, request_id: str) -> bool:
        """Ends a request and frees its blocks at once; its last delta comes with the next step. False when unknown."""
        live = self._live.get(request_id)
        if live is None:
            return False
        for choice in live.choices:
            if not choice.finished:
                self._end(choice.sequence, "abort")
        self._unclaimed.extend(self._collect([live]))
        return True

    def discard(self, request_id: str) -> None:
        """Aborts a request whose reader has gone: its last delta is dropped, and its id is free at once."""
        self.abort(request_id)
        self._unclaimed = [delta for delta in self._unclaimed if delta.request_id != request_id]

    def knows(self, request_id: str) -> bool:
        """Whether a request runs, waits, or has a delta that nobody has taken."""
        return request_id in self._live or any(delta.request_id == request_id for delta in self._unclaimed)

    # --- the step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestDelta]:
        """Runs one step of the batch. Returns what each request gained; empty when nothing is left to do."""
        started = time.monotonic()
        deltas, self._unclaimed = self._unclaimed, []
        plan = self._scheduler.schedule()
        if plan is None:
            return deltas
        try:
            waited = self._run_and_commit(plan)
        except BaseException as error:  # an interrupt, too, leaves the step half done
            waited = self._fail(plan, error)
            if not isinstance(error, Exception):
                # Whoever goes on after an interrupt learns from the next step how these requests ended.
                self._unclaimed = deltas + self._collect(self._touched_by(plan))
                raise
            log.exception("a step failed; its %d requests end with an error", len(plan.entries))
        deltas += self._collect(self._touched_by(plan))
        self._note_step(plan, time.monotonic() - started, waited)
        return deltas

    def _run_and_commit(self, plan: StepPlan) -> float:
        """Returns the seconds spent waiting for the device."""
        self._runner.copy_blocks(plan.copies)
        self._seat_new(plan)
        scoring = [self._scores_prompt(entry) for entry in plan.entries]
        chunks = [chunk_of(entry, score_prompt=scores) for entry, scores in zip(plan.entries, scoring, strict=True)]
        sampling = [self._owner[entry.seq.seq_id][0].request.params for entry in plan.entries if entry.samples]
        output = self._runner.run(chunks, flags_of(sampling, score_prompt=any(scoring)))
        dispatched = time.monotonic()
        jax.block_until_ready(output)
        waited = time.monotonic() - dispatched
        self._take_prompt_logprobs(plan, scoring, output)
        self._commit(plan, output)
        return waited

    def _commit(self, plan: StepPlan, output: StepOutput) -> None:
        tokens, broken, finished = (np.asarray(x).tolist() for x in (output.tokens, output.broken, output.finished))
        logprobs: HostLogprobs | None = None
        sampled: dict[int, Entry] = {}
        for row, entry in enumerate(plan.entries):
            if broken[row]:
                self._end(entry.seq, "error", _NOT_FINITE)
            elif entry.samples and not self._owner[entry.seq.seq_id][1].finished:
                sampled[row] = entry
        self._scheduler.commit(plan, {entry.seq.seq_id: [tokens[row]] for row, entry in sampled.items()})
        for row, entry in sampled.items():
            live, choice = self._owner[entry.seq.seq_id]
            k = live.request.params.logprobs
            if k is not None:
                logprobs = logprobs or HostLogprobs(output.logprobs)
            delta = choice.push(
                tokens[row], None if k is None or logprobs is None else logprobs.at(row, tokens[row], k)
            )
            if finished[row] != (entry.seq.finish_reason is not None):
                raise RuntimeError(
                    f"host and device disagree whether {entry.seq.seq_id} has ended with token {tokens[row]}"
                )
            if choice.finished:
                self._scheduler.finish(entry.seq.seq_id, "stop")
            live.gain(delta)
        for entry in plan.entries:
            if entry.seq.finish_reason == "length" and not self._owner[entry.seq.seq_id][1].finished:
                self._end(entry.seq, "length")
        self._generation_tokens += len(sampled)

    def _seat_new(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for seq in plan.preempted:
            self._owner[seq.seq_id][0].times.num_preemptions += 1
        for seq in plan.newly_seated:
            live, choice = self._owner[seq.seq_id]
            request = live.request
            if live.times.first_scheduled is None:
                live.times.first_scheduled = now
                self._prompt_tokens += len(seq.prompt_ids)
            assert seq.slot is not None, f"{seq.seq_id} was seated without a slot"
            seed = (request.seed + choice.index * _GOLDEN) % 2**64
            self._runner.seat(seq.slot, request.params, request.stop_ids, seed, seq.prompt_ids, seq.output_ids)

    def _scores_prompt(self, entry: Entry) -> bool:
        """Whether the step must bring prompt log-probabilities of this entry."""
        live, _ = self._owner[entry.seq.seq_id]
        return entry.seq.needs_prompt_logprobs and live.prompt_logprobs_known < len(entry.seq.prompt_ids)

    def _take_prompt_logprobs(self, plan: StepPlan, scoring: Seq[bool], output: StepOutput) -> None:
        if not any(scoring):
            return
        host = HostLogprobs(output.prompt_logprobs)
        first_row = 0
        for entry, wanted in zip(plan.entries, scoring, strict=True):
            if wanted:
                live, _ = self._owner[entry.seq.seq_id]
                prompt, k = entry.seq.prompt_ids, live.request.params.prompt_logprobs or 0
                positions = range(max(entry.start + 1, live.prompt_logprobs_known), min(entry.end + 1, len(prompt)))
                scores = host.of_prompt(first_row - entry.start - 1, positions, prompt, k)
                if scores is None:
                    self._end(entry.seq, "error", _NOT_FINITE)
                else:
                    live.add_prompt_logprobs(scores)
            first_row += entry.num_tokens

    def _fail(self, plan: StepPlan, error: BaseException) -> float:
        if self._runner.restore():
            self._scheduler.forget_computed()
        for entry in plan.entries:
            self._end(entry.seq, "error", f"the step failed: {type(error).__name__}: {error}")
        return 0.0

    def _end(self, seq: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Ends a sequence from outside the scheduler, wherever it stands."""
        self._scheduler.finish(seq.seq_id, reason)
        live, choice = self._owner[seq.seq_id]
        if not choice.finished:
            live.gain(choice.end(reason, error))

    def _touched_by(self, plan: StepPlan) -> list[LiveRequest]:
        """The requests of a step, in its order."""
        owners = map(self._owner.get, [entry.seq.seq_id for entry in plan.entries])
        return list(dict.fromkeys(owner[0] for owner in owners if owner is not None))

    def _collect(self, lives: Iterable[LiveRequest]) -> list[RequestDelta]:
        """The deltas of some requests; those that have ended are forgotten."""
        now = time.monotonic()
        deltas = []
        for live in lives:
            delta = live.take_delta(now)
            if delta is None:
                continue
            if delta.finished:
                del self._live[live.request.request_id]
                for choice in live.choices:
                    del self._owner[choice.sequence.seq_id]
            deltas.append(delta)
        return deltas

    def _new_sequence(self, request: Request, index: int, prompt_ids: list[int]) -> Sequence:
        params = request.params
        assert params.max_tokens is not None, "prepare resolves max_tokens"
        return Sequence(
            seq_id=f"{request.request_id}:{index}",
            request_id=request.request_id,
            prompt_ids=prompt_ids,
            max_tokens=params.max_tokens,
            stop_ids=frozenset(request.stop_ids),
            min_tokens=params.min_tokens,
            priority=request.priority,
            arrival=next(self._arrivals),
            cache_salt=request.cache_salt,
            needs_prompt_logprobs=params.prompt_logprobs is not None and index == 0,
        )

    def _note_step(self, plan: StepPlan, seconds: float, waited: float) -> None:
        total = plan.num_tokens
        decodes = sum(e.num_tokens == 1 and e.start >= len(e.seq.prompt_ids) for e in plan.entries)
        self.last_step = StepStats(total, total - decodes, decodes, seconds - waited, waited)

    # --- whole generations ----------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Runs prompts to their end, batched as they fit, and returns their outputs in order.

        params: for all prompts, or one for each. progress: shows a bar when there are several prompts.
        Raises RequestError for the first prompt that is refused; nothing has run then.
        """
        return generation.generate(self, prompts, params, progress=progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> generation.Stream:
        """Runs one prompt and yields what it gains; closing the stream early aborts the request.

        Raises RequestError at once, not at the first item.
        """
        return generation.stream(self, prompt, params)

    def step_for(self, request_ids: Container[str]) -> list[RequestDelta]:
        """One step that returns the deltas of some requests; those of the others wait for the next `step`."""
        mine: list[RequestDelta] = []
        others: list[RequestDelta] = []
        for delta in self.step():
            (mine if delta.request_id in request_ids else others).append(delta)
        self._unclaimed = others + self._unclaimed
        return mine

    # --- looking inside -------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        ledger, counters = self._scheduler.ledger, self._scheduler.counters
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_usage=ledger.num_held / ledger.num_blocks,
            num_blocks=ledger.num_blocks,
            num_blocks_held=ledger.num_held,
            num_blocks_cached=ledger.num_cached,
            block_size=self._scheduler.config.block_size,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_preemptions=counters.num_preemptions,
            recompilations=self._runner.recompilations,
        )

    def memory_report(self) -> MemoryReport:
        """Bytes of weights, workspace and KV pages, and what the pool holds."""
        return self._memory

    def page_map(self) -> list[PageView]:
        """Every block of the pool: its state, and which requests hold it."""
        return view_pages(self._scheduler.ledger, [choice.sequence for _, choice in self._owner.values()])

    def read_pages(self, blocks: Seq[int]) -> np.ndarray:
        """The keys and values of some blocks: float32 [len(blocks), L, 2, K, block_size, D] (index 0 is K, 1 is V)."""
        return self._runner.read_pages(blocks)

    def check(self) -> None:
        """Raises when the ledger does not balance, something was compiled after the warm-up, or an idle engine holds something.

        For tests and idle moments.
        """
        self._scheduler.check()
        if self._live and not self._scheduler.has_unfinished:
            raise RuntimeError(f"requests {self.unfinished} have no sequence left and have not ended")
        if self._runner.recompilations:
            raise RuntimeError(f"{self._runner.recompilations} compilations after the warm-up")
        if not self._live and (self._owner or self._scheduler.num_running or self._scheduler.ledger.num_held):
            raise RuntimeError(f"the engine is idle but holds something: {self._scheduler.ledger.describe()}")

    def poison_free_pages(self) -> None:
        """Fills every page that nobody holds or may find in the prefix cache with NaN, to prove that nobody reads them."""
        ledger = self._scheduler.ledger
        self._runner.poison([block for block in range(ledger.num_blocks) if ledger.state(block) == "free"])

    def close(self) -> None:
        """Lets go of weights and pool; the engine cannot be used afterwards."""
        self._runner.close()
