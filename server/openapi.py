"""The OpenAPI page. Bodies are read by `read_json`, not by FastAPI, so the page is told about them here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from server.protocol.base import RequestModel, ResponseModel
from server.protocol.service import ErrorResponse

_REF = "#/components/schemas/{model}"


def error_docs(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorResponse} for status in statuses}


def body_docs(request: type[RequestModel], response: type[ResponseModel]) -> dict[str, Any]:
    """Keyword arguments for a route that reads `request` with `read_json`."""
    schema = {"$ref": _REF.format(model=request.__name__)}
    return {
        "response_model": None,
        "responses": {200: {"model": response}} | error_docs(400, 401, 404, 413, 415, 500, 503),
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    }


def generation_docs(request: type[RequestModel], response: type[ResponseModel]) -> dict[str, Any]:
    """The same for a route that can stream: server-sent events are a second kind of content."""
    docs = body_docs(request, response)
    docs["responses"][200] = {
        "model": response,
        "description": "The answer; with `stream`, events of `data: <chunk>`, the last one `data: [DONE]`.",
        "content": {"text/event-stream": {}},
    }
    return docs


def install_openapi(app: FastAPI, requests: list[type[RequestModel]]) -> None:
    """Makes /openapi.json hold the request models, which FastAPI has not seen."""

    def page() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, definitions = models_json_schema([(model, "validation") for model in requests], ref_template=_REF)
            schema["components"]["schemas"] |= definitions["$defs"]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = page  # type: ignore[method-assign]
