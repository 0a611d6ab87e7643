"""An app served over a real socket, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from server.app import create_app
from server.port import bind
from server.settings import ServerSettings
from server.state import ServerState


@contextmanager
def live_server(engine: Any, settings: ServerSettings | None = None) -> Iterator[str]:
    """Serves `engine` (None: forever loading) and yields the base URL."""
    state = ServerState(settings or ServerSettings())
    sock = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(state), loop="uvloop", http="httptools", ws="none", lifespan="off", log_config=None, access_log=False
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        if engine is not None:
            engine.start()
            state.use(engine)
        await server.serve(sockets=[sock])

    thread = threading.Thread(target=lambda: asyncio.run(run(), loop_factory=config.get_loop_factory()))
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
