"""What the server says of itself: models, health, readiness, version, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.errors import ApiError
from server.openapi import error_docs
from server.protocol.service import ModelCard, ModelList, Status, Version
from server.state import ServerState
from server.version import package_version

if TYPE_CHECKING:
    from jaxkv.engine.engine import Engine


def service_router(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["service"])

    @router.get("/v1/models", response_model=ModelList, responses=error_docs(401, 503))
    async def models() -> Response:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [_card(state.engine.engine, state.created)]})

    @router.get("/v1/models/{model:path}", response_model=ModelCard, responses=error_docs(401, 404, 503))
    async def model(model: str) -> Response:
        """The model of that name, if it is served."""
        return JSONResponse(_card(state.admit(model).engine, state.created))

    @router.get("/health", response_model=Status)
    async def health() -> Response:
        """200 as long as the process is alive."""
        return JSONResponse({"status": "ok"})

    @router.get("/ready", response_model=Status, responses=error_docs(503))
    async def ready() -> Response:
        """200 if a request would be served now: the model is loaded and the engine's loop comes round."""
        reason = state.unready_reason()
        if reason is not None:
            raise ApiError(503, f"not ready: {reason}", code="not_ready", retry_after=1)
        return JSONResponse({"status": "ready"})

    @router.get("/version", response_model=Version, responses=error_docs(401))
    async def show_version() -> Response:
        return JSONResponse({"version": package_version()})

    @router.get(
        "/metrics",
        response_class=Response,
        responses=error_docs(401, 503) | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(state.metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return router


def _card(engine: Engine, created: int) -> dict[str, Any]:
    return {
        "id": engine.model_name,
        "object": "model",
        "created": created,
        "owned_by": "jaxkv",
        "root": engine.config.model,
        "max_model_len": engine.config.max_model_len,
    }
