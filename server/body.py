"""Reading a request body: bounded, strict JSON, validated, and every complaint a 400 that names the field."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request
from pydantic import ValidationError

from server.errors import ApiError
from server.protocol.base import RequestModel
from server.protocol.values import FAULT

logger = logging.getLogger("jaxkv.server")

_SHOWN = 60
_MAX_NAMES = 10


async def read_json[M: RequestModel](request: Request, model: type[M], *, max_bytes: int) -> M:
    """The request body as `model`. Raises ApiError 400, 413 or 415.

    Fields that the model does not know are named in one log line and otherwise ignored.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, f"content type is {media_type!r}: send the body as 'application/json'")
    raw = await _read(request, max_bytes)
    try:
        parsed = model.model_validate_json(raw)
    except ValidationError as error:
        raise _complaint(error) from None
    if parsed.model_extra:
        names = [repr(name[:_SHOWN]) for name in sorted(parsed.model_extra)]
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        logger.info("%s: ignored unknown fields %s%s", request.url.path, ", ".join(names[:_MAX_NAMES]), more)
    return parsed


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise ApiError(413, f"the request body is larger than {max_bytes} bytes, the limit")
        chunks.append(chunk)
    return b"".join(chunks)


def _complaint(error: ValidationError) -> ApiError:
    """Tells the first fault only: the client repairs one at a time anyway."""
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the request body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return ApiError(400, "the request body must be a JSON object")
    param = str(first["loc"][0])
    where = ".".join(str(part)[:_SHOWN] for part in first["loc"])
    if first["type"] == "missing":
        return ApiError(400, f"{where} is missing", param=param)
    if first["type"] == FAULT:
        return ApiError(400, f"{where}: {first['msg']}", param=param)
    return ApiError(400, f"{where} is {_shown(first['input'])}: {first['msg']}", param=param)


def _shown(value: Any) -> str:
    """A value as an error message may show it: short, whatever the client sent."""
    if value is None or isinstance(value, bool | int | float):
        return f"{value!r}"[:_SHOWN]
    if isinstance(value, str):
        return repr(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
    return f"a JSON {'array' if isinstance(value, list | tuple) else 'object'}"
