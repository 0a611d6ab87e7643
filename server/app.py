"""The FastAPI application: routes, errors and the API key, put together."""

from __future__ import annotations

from fastapi import FastAPI

from server.auth import ApiKeyGuard
from server.errors import install_error_handlers
from server.openapi import install_openapi
from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from server.routes.chat import chat_router
from server.routes.completions import completions_router
from server.routes.service import service_router
from server.routes.tokenization import tokenization_router
from server.state import ServerState
from server.version import package_version


def create_app(state: ServerState) -> FastAPI:
    """An app over `state`. It answers 503 until `state.use(engine)` has been called with a started AsyncEngine."""
    app = FastAPI(
        title="jaxkv",
        version=package_version(),
        description="OpenAI-compatible serving of one language model.",
        redirect_slashes=False,
    )
    for make_router in (completions_router, chat_router, tokenization_router, service_router):
        app.include_router(make_router(state))
    install_error_handlers(app)
    install_openapi(app, [CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest])
    if state.settings.api_key is not None:
        app.add_middleware(ApiKeyGuard, api_key=state.settings.api_key)
    return app
