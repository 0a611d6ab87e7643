"""The API key: a plain ASGI layer, so that it costs nothing per streamed chunk and hides no disconnect."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError, error_response

OPEN_PATHS = frozenset({"/health", "/ready"})


class ApiKeyGuard:
    """Refuses with 401 what does not carry `Authorization: Bearer <api_key>`, except OPEN_PATHS."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self._digest = hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            refusal = ApiError(
                401, "missing or wrong API key: send it as 'Authorization: Bearer <key>'", code="invalid_api_key"
            )
            await error_response(refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        # Digests have one length, and compare_digest takes the same time wherever they differ.
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                digest = hashlib.sha256(key.strip()).digest()
                return hmac.compare_digest(digest, self._digest) and scheme.lower() == b"bearer"
        return False
