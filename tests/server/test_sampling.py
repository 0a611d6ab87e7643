"""Which value wins: the request's, the model's, or OpenAI's."""

from __future__ import annotations

from typing import Any

import pytest

from jaxkv.core.errors import RequestError
from jaxkv.core.sampling_params import SamplingParams
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.sampling import chat_sampling, completion_sampling


def completion(model_defaults: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    return completion_sampling(CompletionRequest(prompt="x", **fields), model_defaults or {})


def chat(model_defaults: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    messages = [{"role": "user", "content": "x"}]
    return chat_sampling(ChatCompletionRequest.model_validate({"messages": messages, **fields}), model_defaults or {})


def test_openais_defaults() -> None:
    assert completion() == SamplingParams(max_tokens=16)
    assert chat() == SamplingParams()


def test_the_models_defaults_come_before_openais_and_the_requests_before_both() -> None:
    model = {"temperature": 0.2, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1}
    assert completion(model) == SamplingParams(max_tokens=16, **model)
    assert completion(model, temperature=0, top_p=1.0) == SamplingParams(
        max_tokens=16, **(model | {"temperature": 0, "top_p": 1.0})
    )
    assert chat(model, temperature=None).temperature == 0.2


def test_null_is_absent_except_for_max_tokens() -> None:
    assert (
        completion(max_tokens=None, temperature=None, stop=None, logit_bias=None, seed=None, n=None) == SamplingParams()
    )


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7


def test_echo_scores_the_prompt_as_deep_as_anybody_asks() -> None:
    assert completion(echo=True).prompt_logprobs is None
    assert completion(echo=True, logprobs=2).prompt_logprobs == 2
    assert completion(echo=True, logprobs=2, prompt_logprobs=5).prompt_logprobs == 5
    assert completion(echo=True, max_tokens=0).prompt_logprobs == 0
    assert completion(logprobs=2).prompt_logprobs is None


def test_chat_logprobs_count_by_top_logprobs() -> None:
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert chat(logprobs=False).logprobs is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"stream_options": {}}, "stream_options"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)
def test_what_is_not_supported_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        completion(**fields)
    assert refused.value.param == param


def test_harmless_forms_of_the_unsupported_are_accepted() -> None:
    assert completion(best_of=None, suffix="", response_format={"type": "text"}) == SamplingParams(max_tokens=16)
    assert chat(tools=[]) == SamplingParams()
