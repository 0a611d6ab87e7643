"""From request fields to SamplingParams: the request, then the model's generation_config, then OpenAI's default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxkv.core.errors import RequestError
from jaxkv.core.sampling_params import SamplingParams
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from server.protocol.sampling import GenerationFields

_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_REQUEST_ONLY = (
    "n",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def completion_sampling(request: CompletionRequest, model_defaults: Mapping[str, Any]) -> SamplingParams:
    """Raises RequestError for combinations that make no sense or are not supported."""
    if request.best_of is not None:
        raise RequestError("best_of is not supported: use n", param="best_of")
    if request.suffix:
        raise RequestError("suffix is not supported: this model completes at the end only", param="suffix")
    prompt_logprobs = request.prompt_logprobs
    max_tokens = _max_tokens(request, ("max_tokens",), DEFAULT_MAX_TOKENS)
    if request.echo:
        wanted = [k for k in (prompt_logprobs, request.logprobs) if k is not None]
        # Scoring without logprobs still runs the prompt: an answer of 0 tokens has to come from a step.
        prompt_logprobs = max(wanted) if wanted else (0 if max_tokens == 0 else None)
    return _sampling(request, model_defaults, max_tokens, request.logprobs, prompt_logprobs)


def chat_sampling(request: ChatCompletionRequest, model_defaults: Mapping[str, Any]) -> SamplingParams:
    """Raises RequestError, its `param` spelled as chat clients spell it."""
    if request.tools:
        raise RequestError("tools are not supported: leave the list empty", param="tools")
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    names = ("max_completion_tokens", "max_tokens")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = _max_tokens(request, names, None)
    try:
        return _sampling(request, model_defaults, max_tokens, logprobs, request.prompt_logprobs)
    except RequestError as error:
        if error.param == "max_tokens" and request.max_completion_tokens is not None:
            error.param = "max_completion_tokens"
        raise


def _sampling(
    request: GenerationFields,
    model_defaults: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise RequestError('response_format: only {"type": "text"} is supported', param="response_format")
    given = {name: getattr(request, name) for name in (*_FROM_MODEL, *_REQUEST_ONLY)}
    chosen = {name: model_defaults.get(name) for name in _FROM_MODEL} | {
        k: v for k, v in given.items() if v is not None
    }
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **{name: value for name, value in chosen.items() if value is not None},
    )


def _max_tokens(request: GenerationFields, names: tuple[str, ...], default: int | None) -> int | None:
    """A null that the client wrote means as much as fits; only a field left out takes the default."""
    if any(name in request.model_fields_set for name in names):
        return next((value for name in names if (value := getattr(request, name)) is not None), None)
    return default
