"""Runs the server: the port is bound at once, the model loads in a thread, SIGTERM drains.

Exit codes: 0 after a drain, 1 when the model could not be had, 128 + the signal after a second signal.
"""

from __future__ import annotations

import asyncio
import gc
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
    from jaxkv.engine.async_engine import AsyncEngine

logger = logging.getLogger("jaxkv.server")

_KEEP_ALIVE_SECONDS = 75
"""Longer than the idle time after which common load balancers close: so that it is never the server that does first."""
_FLUSH_SECONDS = 5
"""Time for the last bytes of ended streams to reach their clients."""


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
        self._draining = False
        self._url = ""
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
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
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
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        logger.info("listening on %s; requests get 503 until the model is loaded", self._url)
        self.loader.start()

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # In place of uvicorn's: it would close the port first, and running streams would race its timeout.
        if self._draining:
            # At once means not waiting for anything: not for clients, nor for a step that may be the reason to stop.
            os._exit(128 + sig)
        self._draining = True
        self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._drain_task = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        logger.info(
            "draining: running requests have up to %g s to finish; a second signal stops at once",
            self._settings.shutdown_timeout,
        )
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
        # What is alive now stays: the garbage collector need not look at it again, which takes long enough to be seen between tokens.
        gc.collect()
        gc.freeze()
        loaded.engine.start()
        self._async_engine = loaded.engine
        self._state.use(loaded.engine)
        if not self._draining:
            logger.info("ready: serving %s on %s", loaded.engine.engine.model_name, self._url)

    def _fail(self, error: BaseException | None) -> None:
        if isinstance(error, JaxkvError):
            logger.error("the model could not be loaded: %s", error)
        else:
            logger.error("the model could not be loaded", exc_info=error)
        self.exit_code = 1
        self.should_exit = True
