"""The fields that completions and chat share."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jaxkv.core.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_TOKEN_IDS
from server.protocol.base import RequestModel
from server.protocol.values import MAX_TOKEN_ID, LogitBias, Stop, TokenIds

INT64 = 2**63


class StreamOptions(RequestModel):
    include_usage: bool | None = Field(
        None, description="Send one last chunk with the usage and without choices (default false)."
    )


class GenerationFields(RequestModel):
    """Null is the same as absent: the model's own default, then OpenAI's. Only max_tokens tells null apart."""

    model: str | None = Field(None, description="The served model; may be left out.")
    n: int | None = Field(None, ge=1, le=MAX_N, description="Choices per prompt.")
    temperature: float | None = Field(None, ge=0, description="0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID, description="0 or -1 is off.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, le=INT64 - 1, description="Same seed, same answer; absent: a random one.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="On tokens of the output.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="On tokens of the output.")
    repetition_penalty: float | None = Field(None, gt=0, description="On tokens of the prompt and the output.")
    logit_bias: LogitBias | None = Field(None, description="Token id to an addend from -100 to 100.")
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID, description="Null: as much as fits.")
    min_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    stop: Stop | None = Field(None, description="Strings before which the answer ends.")
    stop_token_ids: TokenIds | None = Field(None, description=f"At most {MAX_STOP_TOKEN_IDS}.")
    ignore_eos: bool | None = Field(None, description="Go on past the end of the answer (for benchmarks).")
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text (default true).")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Log-probabilities of the prompt's tokens, with this many alternatives.",
    )
    stream: bool | None = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Requests share cached prefixes only under the same salt."
    )
    priority: int | None = Field(None, ge=-INT64, le=INT64 - 1, description="Lower goes first (priority scheduling).")
    response_format: dict[str, Any] | None = Field(None, description='Only {"type": "text"} is supported.')

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)
