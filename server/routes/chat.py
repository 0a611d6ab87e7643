"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.answer import answer
from server.body import read_json
from server.chat_writer import ChatWriter
from server.generation import open_generation
from server.openapi import generation_docs
from server.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from server.sampling import chat_sampling
from server.state import ServerState


def chat_router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post("/v1/chat/completions", **generation_docs(ChatCompletionRequest, ChatCompletionResponse))
    async def create_chat_completion(http: Request) -> Response:
        """Answers a conversation through the model's chat template."""
        body = await read_json(http, ChatCompletionRequest, max_bytes=state.settings.max_body_bytes)
        engine = state.admit(body.model)
        generation = await open_generation(
            engine,
            state.metrics,
            [body.chat(body.messages)],
            chat_sampling(body, engine.engine.generation_config),
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            add_special_tokens=False,
        )
        return await answer(
            http,
            generation,
            ChatWriter(body, engine.engine.tokenizer),
            model=engine.engine.model_name,
            stream=bool(body.stream),
            include_usage=body.include_usage,
        )

    return router
