"""Turns a prompt and its parameters into a Request, or refuses with the reason. Any thread may call it."""

from __future__ import annotations

import dataclasses
import random
import uuid
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from jaxkv.core.errors import RequestError
from jaxkv.core.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams, shown
from jaxkv.engine.request import Prompt, Request
from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.text.chat import render_chat
from jaxkv.text.tokenizer import Tokenizer

MAX_SALT_LENGTH = 1024
_CHAT_KEYS = {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}


class Admission:
    """Checks requests against one engine's limits.

    vocab_size: of the model. limits: the scheduler's, whose own check decides what can never fit.
    seed: draws seeds for requests that bring none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_ids: Sequence[int],
        limits: SchedulerConfig,
        chat_template: str | None,
        seed: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._limits = limits
        self._seeds = random.Random(seed)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> Request:
        """Raises RequestError that names the parameter at fault."""
        text, ids = self.encode(prompt, add_special_tokens=add_special_tokens)
        if not ids:
            raise RequestError("the prompt is empty: it must have at least one token", param="prompt")
        if max(ids) >= self._vocab_size:
            raise RequestError(
                f"the tokenizer made token {max(ids)} of this prompt, but the model's vocabulary ends at "
                f"{self._vocab_size - 1}: the tokenizer does not belong to this model",
                param="prompt",
            )
        if priority and self._limits.policy != "priority":
            raise RequestError(
                f"priority is {priority}, but the engine serves first come, first served: "
                "start it with --scheduling-policy priority",
                param="priority",
            )
        self._check_ids(params)
        if cache_salt is not None and not (isinstance(cache_salt, str) and 1 <= len(cache_salt) <= MAX_SALT_LENGTH):
            raise RequestError(
                f"cache_salt is {shown(cache_salt)}: it must be a string of 1 to {MAX_SALT_LENGTH} characters",
                param="cache_salt",
            )
        if request_id is not None and not (isinstance(request_id, str) and request_id):
            raise RequestError(f"request_id is {shown(request_id)}: it must be a string", param="request_id")
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {shown(params)}: it must be SamplingParams", param="params")
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
            raise RequestError(f"priority is {shown(priority)}: it must be a 64-bit whole number", param="priority")
        return Request(
            request_id=request_id or uuid.uuid4().hex,
            prompt=text,
            prompt_token_ids=tuple(ids),
            params=self._bounded(params, len(ids)),
            seed=self._seeds.getrandbits(64) if params.seed is None else params.seed % 2**64,
            stop_ids=self._stop_ids(params),
            priority=priority,
            cache_salt=cache_salt,
        )

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[str | None, list[int]]:
        """The text that was encoded (None for ids) and the token ids."""
        if isinstance(prompt, str):
            return prompt, self._encode_text(prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, Mapping):
            return self._encode_chat(prompt)
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise RequestError(
                f"the prompt is {shown(prompt)}: it must be a text, a list of token ids, or a chat", param="prompt"
            )
        if prompt and all(isinstance(item, Mapping) for item in prompt):
            return self._encode_chat({"messages": prompt})
        return None, self._checked_prompt_ids(prompt)

    def _encode_chat(self, chat: Mapping[str, Any]) -> tuple[str, list[int]]:
        unknown = set(chat) - _CHAT_KEYS
        if unknown or "messages" not in chat:
            raise RequestError(
                f"a chat prompt has the keys {shown(list(chat))}: it needs `messages` and may have {sorted(_CHAT_KEYS - {'messages'})}",
                param="messages",
            )
        continue_final = bool(chat.get("continue_final_message", False))
        text = render_chat(
            self.chat_template,
            chat["messages"],
            add_generation_prompt=bool(chat.get("add_generation_prompt", not continue_final)),
            continue_final_message=continue_final,
            template_kwargs=chat.get("chat_template_kwargs"),
            **self.tokenizer.special_tokens,
        )
        return text, self._encode_text(text, add_special_tokens=False)

    def _encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Refuses a text that is hopelessly long before it is encoded, which would take seconds and gigabytes."""
        least, context = self.tokenizer.least_tokens(text), self._limits.max_model_len
        if least > context:
            raise RequestError(
                f"the prompt has at least {least} tokens, by its {len(text)} characters, but the model's context is {context} "
                "tokens: shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _checked_prompt_ids(self, ids: Sequence[Any]) -> list[int]:
        for position, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < self._vocab_size:
                raise RequestError(
                    f"prompt token {position} is {shown(token)}: it must be a whole number from 0 to {self._vocab_size - 1}",
                    param="prompt",
                )
        return [int(token) for token in ids]

    def _check_ids(self, params: SamplingParams) -> None:
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token in ids:
                if token >= self._vocab_size:
                    raise RequestError(
                        f"{name} names token {token}, but the vocabulary ends at {self._vocab_size - 1}", param=name
                    )

    def _bounded(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(self._limits.room_for_output(prompt_len), 1)
        self._limits.check_fits(prompt_len, max_tokens)
        if params.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, but only {max_tokens} output tokens fit after the prompt",
                param="min_tokens",
            )
        return dataclasses.replace(params, max_tokens=max_tokens)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos = () if params.ignore_eos else self._eos_ids
        ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids and the model's {len(eos)} end-of-sequence ids are {len(ids)} together, "
                f"at most {MAX_STOP_TOKEN_IDS} are supported",
                param="stop_token_ids",
            )
        return ids
