"""Every error that jaxkv raises on purpose. Each message says what was wrong, the value, the limit and what to do."""

from __future__ import annotations


class JaxkvError(Exception):
    """Root of all deliberate errors."""


class ConfigError(JaxkvError):
    """The engine cannot be built as asked (raised when it is built, never while serving)."""


class ModelLoadError(JaxkvError):
    """A model cannot be found, fetched or read; the message names the file, tensor or key."""


class RequestError(JaxkvError):
    """A request is refused on admission. Becomes HTTP 400.

    Attributes:
      param: the request field at fault, as the client spelled it, or None.
      code: a stable machine-readable word, e.g. `context_length_exceeded`, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(JaxkvError):
    """The waiting queue is at its limit. Becomes HTTP 503 with Retry-After.

    Attributes:
      retry_after: seconds after which trying again is sensible.
    """

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStoppedError(JaxkvError):
    """The engine is shutting down or has stopped; no new request is taken. Becomes HTTP 503."""
