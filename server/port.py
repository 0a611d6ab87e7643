"""The listening socket. Imports nothing heavy, so that the port is bound before the web framework is even loaded."""

from __future__ import annotations

import socket

from jaxkv.core.errors import JaxkvError

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
