"""POST /v1/chat/completions on the wire."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jaxkv.core.sampling_params import MAX_LOGPROBS
from server.protocol.base import RequestModel, ResponseModel
from server.protocol.completions import PromptLogprobs
from server.protocol.sampling import GenerationFields
from server.protocol.usage import Usage
from server.protocol.values import MAX_TOKEN_ID, Content


class ChatMessage(RequestModel):
    """Further fields go to the model's chat template as they are."""

    role: str = Field(examples=["system", "user", "assistant"])
    content: Content = Field(None, description="Text, or a list of text parts.")


class ChatOptions(RequestModel):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn (default true).")
    continue_final_message: bool | None = Field(None, description="Continue the last message instead of a new turn.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables of the chat template.")

    def chat(self, messages: list[ChatMessage]) -> dict[str, Any]:
        """The chat as the engine takes it."""
        continues = bool(self.continue_final_message)
        adds = self.add_generation_prompt
        return {
            "messages": [message.model_dump(exclude_unset=True) for message in messages],
            "add_generation_prompt": (not continues) if adds is None else adds,
            "continue_final_message": continues,
            "chat_template_kwargs": self.chat_template_kwargs or {},
        }


class ChatCompletionRequest(GenerationFields, ChatOptions):
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKEN_ID, description="OpenAI's newer name of max_tokens; it wins if both are given."
    )
    logprobs: bool | None = Field(None, description="Return log-probabilities of the answer's tokens.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Alternatives per token; needs logprobs.")
    tools: list[Any] | None = Field(None, description="Not supported: a non-empty list is refused.")


class ChatTopLogprob(ResponseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(ResponseModel):
    content: list[ChatTokenLogprob]


class ChatAnswer(ResponseModel):
    role: str
    content: str


class ChatChoice(ResponseModel):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None = Field(description='"stop", "length", "abort" or "error".')
    stop_reason: str | int | None = Field(description="The stop string or stop token id that ended it.")


class ChatCompletionResponse(ResponseModel):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
