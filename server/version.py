"""The version that the server tells."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """jaxkv's version; "unknown" in a source tree that was never installed."""
    try:
        return version("jaxkv")
    except PackageNotFoundError:
        return "unknown"
