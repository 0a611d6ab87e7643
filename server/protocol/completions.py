"""POST /v1/completions on the wire."""

from __future__ import annotations

from pydantic import Field

from jaxkv.core.sampling_params import MAX_LOGPROBS
from server.protocol.base import ResponseModel
from server.protocol.sampling import GenerationFields
from server.protocol.usage import Usage
from server.protocol.values import Prompt

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route, where the request says nothing; chat answers go on as long as they fit."""


class CompletionRequest(GenerationFields):
    prompt: Prompt = Field(description="Text, token ids, or a list of either.")
    echo: bool | None = Field(None, description="Put the prompt before the answer; with max_tokens 0: scoring.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Log-probabilities of the tokens, with this many alternatives."
    )
    add_special_tokens: bool | None = Field(None, description="Let the tokenizer add e.g. BOS (default true).")
    best_of: int | None = Field(None, description="Not supported: any value is refused.")
    suffix: str | None = Field(None, description="Not supported: any text is refused.")


class CompletionLogprobs(ResponseModel):
    """Four parallel lists, one entry per token. Entry 0 is null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Where in the choice's text the token begins, in characters.")


class PromptLogprob(ResponseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(ResponseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None = Field(description='"stop", "length", "abort" or "error"; null while it goes on.')
    stop_reason: str | int | None = Field(description="The stop string or stop token id that ended it.")
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(ResponseModel):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
