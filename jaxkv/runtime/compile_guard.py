"""Counts compilations inside an engine's device calls, so that none happens unseen while serving."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""JAX reports it, in the calling thread, each time a function is lowered, even if the executable then comes from the disk cache."""


class CompileGuard:
    """Counts what is compiled inside `watch()` blocks. After warm-up the count should stay where it was."""

    def __init__(self) -> None:
        self._watching = threading.local()
        self.compilations = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Counts compilations of this thread, not those of other code in the process."""
        self._watching.now = True
        try:
            yield
        finally:
            self._watching.now = False

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event == _LOWERED and getattr(self._watching, "now", False):
            self.compilations += 1
