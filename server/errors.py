"""One error body for every failure: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from jaxkv.core.errors import EngineStoppedError, QueueFullError, RequestError

logger = logging.getLogger("jaxkv.server")

CLIENT_CLOSED_REQUEST = 499
"""Status for the log when nobody is left to read an answer."""

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """An answer other than 200, decided by the HTTP floor.

    status: HTTP status; param: the field at fault as the client spelled it; code: a stable machine-readable word;
    retry_after: seconds for the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        return error_body(self.status, self.message, param=self.param, code=self.code)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of any exception. Unforeseen ones are logged with their traceback and told in general."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), code="shutting_down", retry_after=1)
    logger.error("unexpected error while serving a request", exc_info=error)
    return ApiError(500, f"internal error: {type(error).__name__}; see the server's log", code="internal_error")


def error_response(error: Exception) -> Response:
    api_error = as_api_error(error)
    headers = {} if api_error.retry_after is None else {"Retry-After": str(api_error.retry_after)}
    if api_error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(api_error.body(), api_error.status, headers)


def install_error_handlers(app: FastAPI) -> None:
    async def known(_request: Request, error: Exception) -> Response:
        return error_response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"no such route: {request.method} {request.url.path}",
            405: f"method {request.method} is not allowed on {request.url.path}",
        }.get(error.status_code, str(error.detail))
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)

    async def gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    for kind in (ApiError, RequestError, QueueFullError, EngineStoppedError, Exception):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
