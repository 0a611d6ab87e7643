"""POST /tokenize and /detokenize on the wire."""

from __future__ import annotations

from pydantic import Field

from server.protocol.base import RequestModel, ResponseModel
from server.protocol.chat import ChatMessage, ChatOptions
from server.protocol.values import TokenIds


class TokenizeRequest(ChatOptions):
    """Either a text or a chat."""

    model: str | None = None
    prompt: str | None = Field(None, description="A text; the empty one is fine.")
    messages: list[ChatMessage] | None = Field(None, min_length=1, fail_fast=True)
    add_special_tokens: bool | None = Field(
        None, description="Let the tokenizer add e.g. BOS to the text (default true). A chat's template brings its own."
    )
    return_token_strs: bool | None = Field(None, description="Tell each token's text, too.")


class TokenizeResponse(ResponseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: TokenIds


class DetokenizeResponse(ResponseModel):
    prompt: str
