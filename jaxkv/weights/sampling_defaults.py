"""The sampling parameters that a model's own files recommend."""

from __future__ import annotations

from collections.abc import Mapping

from jaxkv.weights.keys import Keys

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty")
_WHOLES = ("top_k",)

HF_SPELLING = {name: name for name in (*_REALS, *_WHOLES)}
"""Our name -> the key of generation_config.json."""

GGUF_SPELLING = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Our name -> the metadata key of a GGUF file."""


def sampling_defaults(values: Mapping[str, object], where: str, spelling: Mapping[str, str]) -> dict[str, int | float]:
    """Those of temperature, top_p, min_p, repetition_penalty and top_k that `values` sets. Raises ModelLoadError."""
    keys = Keys(values, where)
    found: dict[str, int | float | None] = {}
    for name in _REALS:
        found[name] = keys.real_or(spelling[name], None, above=-1.0)
    for name in _WHOLES:
        found[name] = keys.whole_or(spelling[name], None, minimum=-1)
    return {name: value for name, value in found.items() if value is not None}
