"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from jaxkv.core.sampling_params import SamplingParams
from server.body import read_json
from server.errors import ApiError
from server.openapi import body_docs
from server.protocol.tokenization import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from server.state import ServerState

if TYPE_CHECKING:
    from jaxkv.engine.engine import Engine


def tokenization_router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", **body_docs(TokenizeRequest, TokenizeResponse))
    async def tokenize(http: Request) -> Response:
        """The token ids of a text of any length, or of a chat that fits into the model's context."""
        body = await read_json(http, TokenizeRequest, max_bytes=state.settings.max_body_bytes)
        engine = state.admit(body.model).engine
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt")
        return await asyncio.to_thread(_tokenized, engine, body)

    @router.post("/detokenize", **body_docs(DetokenizeRequest, DetokenizeResponse))
    async def detokenize(http: Request) -> Response:
        """The text of token ids, special tokens included."""
        body = await read_json(http, DetokenizeRequest, max_bytes=state.settings.max_body_bytes)
        tokenizer = state.admit(body.model).engine.tokenizer
        largest = max(body.tokens, default=0)
        if largest >= tokenizer.vocab_size:
            raise ApiError(
                400, f"token id {largest} is outside the vocabulary of {tokenizer.vocab_size} tokens", param="tokens"
            )
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    return router


def _tokenized(engine: Engine, body: TokenizeRequest) -> Response:
    """Runs in a thread: megabytes of text must not stop the streams of others."""
    if body.messages is None:
        adds = body.add_special_tokens is not False
        tokens = engine.tokenizer.encode(body.prompt or "", add_special_tokens=adds)
    else:
        tokens = list(engine.prepare(body.chat(body.messages), SamplingParams(max_tokens=1)).prompt_token_ids)
    strings = [engine.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
    limit = engine.config.max_model_len
    return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": strings})
