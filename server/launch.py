"""Runs the server: the port is bound at once, the model loads in a thread, SIGTERM drains.

Exit codes: 0 after a drain, 1 when the port or the model could not be had.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, override

import uvicorn

from jaxkv.core.errors import JaxkvError
from server.app import create_app
from server.settings import ServerSettings
from server.state import ServerState

if TYPE_CHECKING:
    from jaxkv import AsyncEngine

logger = logging.getLogger("jaxkv.server")

_FLUSH_SECONDS = 5
"""Time for the last bytes of ended streams to reach their clients."""
_BACKLOG = 2048


class PortError(JaxkvError):
    """The address cannot be listened on."""


def bind(host: str, port: int) -> socket.socket:
    """A bound, not yet listening socket. Port 0 takes a free one. Raises PortError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        # Listening now, not when the app is up, makes a second server on the port fail here and clients wait.
        sock.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"cannot listen on {host} port {port}: {reason}; choose another with --host and --port"
        raise PortError(message) from error
    return sock


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the loading thread came back with: an engine, or the reason why there is none."""

    engine: AsyncEngine | None = None
    error: BaseException | None = None


def serve(sock: socket.socket, load: Callable[[], AsyncEngine], settings: ServerSettings) -> int:
    """Serves until a signal ends it; returns the exit code. Call it from the main thread.

    load: builds the engine; its loop is started here. It runs in a thread, while requests get 503.
    """
    server = _Server(sock, load, settings)
    server.run(sockets=[sock])
    if server.loader.is_alive():
        # Compiling cannot be interrupted; waiting for it would keep the process for a model that nobody wants any more.
        sys.stderr.flush()
        os._exit(server.exit_code)
    return server.exit_code


class _Server(uvicorn.Server):
    def __init__(self, sock: socket.socket, load: Callable[[], AsyncEngine], settings: ServerSettings) -> None:
        self.exit_code = 0
        self.loader = threading.Thread(target=self._load, args=(load,), name="jaxkv-load", daemon=True)
        self._address = sock.getsockname()
        self._settings = settings
        self._state = ServerState(settings)
        self._async_engine: AsyncEngine | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._signals = 0
        super().__init__(
            uvicorn.Config(
                create_app(self._state),
                loop="uvloop",
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=logger.isEnabledFor(logging.INFO),
                server_header=False,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )

    @override
    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self._address[:2]
        logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        self.loader.start()

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._async_engine is not None:
            await asyncio.to_thread(self._async_engine.shutdown)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # In place of uvicorn's: it would close the port first, and running streams would race its timeout.
        self._signals += 1
        self._loop.call_soon_threadsafe(self._on_signal, self._signals)

    def _on_signal(self, count: int) -> None:
        if count == 1:
            self._drain_task = asyncio.create_task(self._drain())
            return
        logger.warning("second signal: stopping at once")
        self.force_exit = True
        self.should_exit = True

    async def _drain(self) -> None:
        logger.info("draining: running requests have up to %g s to finish", self._settings.shutdown_timeout)
        self._state.drain()
        if self._async_engine is not None:
            await self._async_engine.drain(self._settings.shutdown_timeout)
            # Ends what did not finish in time, so that those clients are told before their connections close.
            await asyncio.to_thread(self._async_engine.shutdown)
        self.should_exit = True

    def _load(self, load: Callable[[], AsyncEngine]) -> None:
        try:
            loaded = Loaded(engine=load())
        except BaseException as error:
            loaded = Loaded(error=error)
        try:
            self._loop.call_soon_threadsafe(self._on_loaded, loaded)
        except RuntimeError:
            logger.info("the model was loaded after the server had stopped")

    def _on_loaded(self, loaded: Loaded) -> None:
        if loaded.engine is None:
            self._fail(loaded.error)
            return
        loaded.engine.start()
        self._async_engine = loaded.engine
        self._state.use(loaded.engine)
        if self._signals == 0:
            logger.info("ready: serving %s", loaded.engine.engine.model_name)

    def _fail(self, error: BaseException | None) -> None:
        if isinstance(error, JaxkvError):
            logger.error("the model could not be loaded: %s", error)
        else:
            logger.error("the model could not be loaded", exc_info=error)
        self.exit_code = 1
        self.should_exit = True
