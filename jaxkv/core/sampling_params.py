"""What a request asks of the sampler, with every limit checked on construction."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        self._normalize_numbers()
        self._check_lengths()

    def _normalize_numbers(self) -> None:
        reals = {
            "temperature": (0.0, math.inf, False),
            "top_p": (0.0, 1.0, True),
            "min_p": (0.0, 1.0, False),
            "presence_penalty": (-2.0, 2.0, False),
            "frequency_penalty": (-2.0, 2.0, False),
            "repetition_penalty": (0.0, math.inf, True),
        }
        wholes = {
            "n": (1, MAX_N),
            "top_k": (-1, 2**31 - 1),
            "seed": (-(2**63), 2**63 - 1),
            "logprobs": (0, MAX_LOGPROBS),
            "prompt_logprobs": (0, MAX_LOGPROBS),
            "max_tokens": (0, 2**31 - 1),
            "min_tokens": (0, 2**31 - 1),
        }
        for name, (low, high, open_low) in reals.items():
            object.__setattr__(self, name, _real(name, getattr(self, name), low, high, open_low=open_low))
        for name, (least, most) in wholes.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, _whole(name, value, least, most))
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias is {shown(self.logit_bias)}: it must map token ids to numbers", param="logit_bias"
            )
        bias = {
            _whole("logit_bias", token, 0, 2**31 - 1): _real("logit_bias", addend, -100.0, 100.0)
            for token, addend in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", bias)

    def _check_lengths(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise RequestError(
                "max_tokens is 0 and prompt_logprobs is off, so there is nothing to compute: ask for at least 1 token",
                param="max_tokens",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: lower one or raise the other",
                param="min_tokens",
            )
        limits = {"logit_bias": MAX_LOGIT_BIAS, "stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_STOP_TOKEN_IDS}
        for name, most in limits.items():
            if len(getattr(self, name)) > most:
                raise RequestError(
                    f"{name} has {len(getattr(self, name))} entries, at most {most} are supported", param=name
                )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise RequestError(
                    f"stop holds {shown(text)}: each must be a string of 1 to {MAX_STOP_LENGTH} characters",
                    param="stop",
                )
        ids = tuple(_whole("stop_token_ids", token, 0, 2**31 - 1) for token in self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


_OPTIONAL = ("seed", "logprobs", "prompt_logprobs", "max_tokens")


def shown(value: object) -> str:
    """A value for a message: short, whatever it is."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Sequence | set | frozenset):
        raise RequestError(f"{name} is {shown(value)}: it must be a list", param=name)
    return tuple(value)


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError
        number = float(value)
    except (TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"{name} is {shown(value)}: it must be a finite number", param=name)
    below = number <= low if open_low else number < low
    if below or number > high:
        bracket = "(" if open_low else "["
        end = "inf)" if high == math.inf else f"{high:g}]"
        raise RequestError(f"{name} is {shown(value)}: it must be in {bracket}{low:g}, {end}", param=name)
    return number


def _whole(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name} is {shown(value)}: it must be a whole number", param=name)
    if not low <= int(value) <= high:
        raise RequestError(f"{name} is {shown(int(value))}: it must be between {low} and {high}", param=name)
    return int(value)
