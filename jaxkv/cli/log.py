"""Logging of the commands: one line per event on stderr."""

from __future__ import annotations

import logging


def log_to_stderr(level: int) -> None:
    """Shows jaxkv's and uvicorn's records from `level` on; libraries speak up only to warn."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    for name in ("jaxkv", "uvicorn"):
        logging.getLogger(name).setLevel(level)
