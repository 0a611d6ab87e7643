"""Prompts as users write them, and the checked request that comes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from jaxkv.core.sampling_params import SamplingParams

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
"""Text; token ids; a chat as a list of messages; or a chat as a dict of `messages` and any of `add_generation_prompt`,
`continue_final_message` and `chat_template_kwargs`."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that passed every check and will fit.

    params: max_tokens is a number. prompt: the text that was encoded, None for token ids. seed: drawn where params has none.
    stop_ids: every id that ends a choice, the model's end-of-sequence ids included unless ignore_eos.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    priority: int = 0
    cache_salt: str | None = None


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Sequence):
        return [prompts]
    if not prompts:
        return []
    first = prompts[0]
    single = isinstance(first, Integral) or (isinstance(first, Mapping) and "role" in first)
    return [prompts] if single else list(prompts)  # type: ignore[arg-type, list-item]
