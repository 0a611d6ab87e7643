"""What the server is doing, and the engine once there is one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from server.errors import ApiError
from server.metrics import Metrics
from server.settings import ServerSettings

if TYPE_CHECKING:
    from jaxkv.engine.async_engine import AsyncEngine

Phase = Literal["loading", "ready", "draining"]


class ServerState:
    """Loading until `use` is called, then ready, then draining once `drain` is. Used from the event loop only."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.phase: Phase = "loading"
        self.created = int(time.time())
        self._engine: AsyncEngine | None = None
        self._metrics: Metrics | None = None

    def use(self, engine: AsyncEngine) -> None:
        """Opens the doors: the engine is loaded and its loop runs."""
        self._engine = engine
        self._metrics = Metrics(engine)
        if self.phase == "loading":
            self.phase = "ready"

    def drain(self) -> None:
        """From now on new requests get 503."""
        self.phase = "draining"

    @property
    def engine(self) -> AsyncEngine:
        """The engine, for routes that answer while draining, too. Raises ApiError 503 while it loads."""
        if self._engine is None:
            raise ApiError(503, "the model is still loading: try again later", code="loading", retry_after=5)
        return self._engine

    @property
    def metrics(self) -> Metrics:
        if self._metrics is None:
            raise ApiError(503, "the model is still loading: try again later", code="loading", retry_after=5)
        return self._metrics

    def admit(self, model: str | None) -> AsyncEngine:
        """The engine for a new request on `model`. Raises ApiError 503 while draining, 404 for an unknown model."""
        engine = self.engine
        if self.phase == "draining":
            raise ApiError(
                503, "the server is shutting down and takes no new requests", code="shutting_down", retry_after=5
            )
        served = engine.engine.model_name
        if model is not None and model != served:
            raise ApiError(
                404,
                f"the model {model[:200]!r} does not exist: this server has {served!r}",
                param="model",
                code="model_not_found",
            )
        return engine

    def unready_reason(self) -> str | None:
        """Why no traffic should come here now; None = it may."""
        if self._engine is None:
            return "loading"
        if self.phase == "draining":
            return "draining"
        if not self._engine.is_ready:
            return "stopped"
        age = self._engine.heartbeat_age()
        if age > self.settings.heartbeat_limit:
            return f"the engine has not come round for {age:.0f} s"
        return None
