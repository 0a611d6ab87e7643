"""What a request asks of the sampler, with every limit checked on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxkv.core.errors import RequestError

MAX_LOGPROBS = 20
"""Most alternatives that `logprobs` and `prompt_logprobs` return per position (a static shape of the step)."""
MAX_LOGIT_BIAS = 1024
"""Most entries of `logit_bias` (a static shape of the slot state)."""
MAX_STOP_TOKEN_IDS = 64
"""Most stop token ids of a request, the model's own end-of-sequence ids included."""
MAX_STOP_STRINGS = 64
"""Most stop strings of a request; each token's text is matched against all of them."""
MAX_STOP_LENGTH = 4096
"""Most characters of a stop string."""
MAX_N = 128
"""Most choices of one request."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Immutable, validated sampling parameters. Raises RequestError that names the field.

    temperature 0 is greedy. top_k 0 or -1 is off. seed None: the engine draws one.
    logprobs / prompt_logprobs: None = off, k = the chosen token and the k best, raw (before temperature and penalties).
    max_tokens None: as much as fits. stop strings end the text before them unless include_stop_str_in_output.
    logit_bias: token id -> addend in [-100, 100].
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        given: object = self.stop
        object.__setattr__(self, "stop", (given,) if isinstance(given, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_numbers()
        self._check_lengths()

    def _check_numbers(self) -> None:
        _real("temperature", self.temperature, 0.0, math.inf)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _whole("n", self.n, 1, MAX_N)
        _whole("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0, 2**31 - 1)
            _real("logit_bias", bias, -100.0, 100.0)

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise RequestError(
                    "max_tokens is 0 and prompt_logprobs is off, so there is nothing to compute: ask for at least 1 token",
                    param="max_tokens",
                )
        _whole("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: lower one or raise the other",
                param="min_tokens",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are supported",
                param="logit_bias",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(self.stop)} strings, at most {MAX_STOP_STRINGS} are supported", param="stop"
            )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise RequestError(
                    f"stop holds {str(text)[:50]!r}: each must be a string of 1 to {MAX_STOP_LENGTH} characters",
                    param="stop",
                )
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31 - 1)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries, at most {MAX_STOP_TOKEN_IDS} are supported",
                param="stop_token_ids",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} is {value!r}: it must be a finite number", param=name)
    below = value <= low if open_low else value < low
    if below or value > high:
        bracket = "(" if open_low else "["
        end = "inf)" if high == math.inf else f"{high:g}]"
        raise RequestError(f"{name} is {value!r}: it must be in {bracket}{low:g}, {end}", param=name)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}: it must be a whole number", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}: it must be between {low} and {high}", param=name)
