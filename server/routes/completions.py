"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from server.answer import answer
from server.body import read_json
from server.completion_writer import CompletionWriter
from server.generation import open_generation
from server.openapi import generation_docs
from server.protocol.completions import CompletionRequest, CompletionResponse
from server.sampling import completion_sampling
from server.state import ServerState


def completions_router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["generation"])

    @router.post("/v1/completions", **generation_docs(CompletionRequest, CompletionResponse))
    async def create_completion(http: Request) -> Response:
        """Continues one prompt or several."""
        body = await read_json(http, CompletionRequest, max_bytes=state.settings.max_body_bytes)
        engine = state.admit(body.model)
        generation = await open_generation(
            engine,
            state.metrics,
            _prompts(body.prompt),
            completion_sampling(body, engine.engine.generation_config),
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            add_special_tokens=body.add_special_tokens is not False,
        )
        writer = CompletionWriter(body, generation.requests, engine.engine.tokenizer)
        return await answer(
            http,
            generation,
            writer,
            model=engine.engine.model_name,
            stream=bool(body.stream),
            include_usage=body.include_usage,
        )

    return router


def _prompts(prompt: Any) -> list[Any]:
    """A text or a list of ids is one prompt, everything else is a list of prompts."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
