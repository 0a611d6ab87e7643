"""What can be chosen about the HTTP server itself; everything about the model is in EngineConfig."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Choices of the HTTP floor.

    api_key: guards every route but /health and /ready; None = open.
    shutdown_timeout: seconds that running requests get to finish after the first SIGTERM.
    heartbeat_limit: seconds without a turn of the engine loop after which /ready says 503.
    max_body_bytes: larger request bodies are refused with 413.
    """

    api_key: str | None = None
    shutdown_timeout: float = 30.0
    heartbeat_limit: float = 60.0
    max_body_bytes: int = 32 * 2**20
