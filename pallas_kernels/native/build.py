"""Compiles a C++ library with the system's compiler and caches it, safe against several processes at once.

A library is named by what it depends on: its sources, the compiler, the flags, the CPU and the versions that the caller gives.
Beside it lies the digest of its bytes, so that a truncated or foreign file is rebuilt instead of loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger("jaxkv")

COMPILERS = ("c++", "g++", "clang++")
# Contraction to fused multiply-adds is off by default in standard modes of GCC.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-fvisibility=hidden", "-w")
LINK_FLAGS = ("-shared", "-fPIC")
BUILD_TIMEOUT_SECONDS = 600
_CPU_FIELDS = {"vendor_id", "cpu family", "model", "model name", "stepping", "flags"} | {
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
    "Features",
}


class NativeBuildError(RuntimeError):
    """A native library cannot be had on this machine; the message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a library is built from.

    units: the files to compile. headers: the files of ours that they include. versions: what else its binary interface
    depends on, such as "jaxlib 0.12.0".
    """

    name: str
    units: tuple[Path, ...]
    headers: tuple[Path, ...]
    include_dirs: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()


def build(source: Source, cache_dir: Path, *, compilers: Sequence[str] = COMPILERS) -> Path:
    """The path of the built library: from `cache_dir`, or compiled now by the first of `compilers` that is able to.

    Raises NativeBuildError.
    """
    found = [path for name in compilers if (path := shutil.which(name))]
    if not found:
        raise NativeBuildError(f"no C++ compiler was found: none of {', '.join(compilers)} is on the PATH")
    reasons = []
    for compiler in dict.fromkeys(os.path.realpath(path) for path in found):
        try:
            return _build_with(compiler, source, cache_dir)
        except NativeBuildError as error:
            reasons.append(str(error))
    raise NativeBuildError("; ".join(reasons))


def _build_with(compiler: str, source: Source, cache_dir: Path) -> Path:
    flags = (*FLAGS, *_cpu_flags(), *(f"-I{path}" for path in source.include_dirs))
    library = cache_dir / f"{source.name}-{_key(compiler, source, flags)}.so"
    if _is_intact(library):
        return library
    with _writing_to(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(library.with_suffix(".lock"), timeout=BUILD_TIMEOUT_SECONDS):
            if _is_intact(library):
                return library
            if library.exists():
                log.warning("the cached library %s is not what was built: building it again", library)
            _compile(compiler, source, flags, library)
    return library


def _compile(compiler: str, source: Source, flags: Sequence[str], library: Path) -> None:
    log.info("building %s with %s, once for this machine", source.name, compiler)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as scratch:
        output = Path(scratch) / library.name
        objects = [str(Path(scratch) / f"{number}.o") for number in range(len(source.units))]
        commands = [
            [compiler, *flags, "-c", str(unit), "-o", to] for unit, to in zip(source.units, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        _run([compiler, *LINK_FLAGS, *objects, "-o", str(output)])
        digest = Path(scratch) / "digest"
        digest.write_text(_digest_of(output), encoding="ascii")
        # The digest goes last: between the two renames the library counts as not intact.
        _digest_file(library).unlink(missing_ok=True)
        os.replace(output, library)
        os.replace(digest, _digest_file(library))


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=BUILD_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"the compiler {command[0]} cannot be run: {_one_line(str(error))}") from error
    if done.returncode != 0:
        complaints = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        complaint = _one_line(complaints[0]) if complaints else "no message"
        raise NativeBuildError(f"the compiler {command[0]} failed with exit code {done.returncode}: {complaint}")
    return done.stdout


@contextlib.contextmanager
def _writing_to(cache_dir: Path) -> Iterator[None]:
    """Turns what can go wrong with files into NativeBuildError."""
    try:
        yield
    except Timeout as error:
        raise NativeBuildError(f"another process has held the lock {error.lock_file} for too long") from error
    except OSError as error:
        raise NativeBuildError(
            f"the cache directory {cache_dir} cannot be written: {error.strerror or error}"
        ) from error


def _key(compiler: str, source: Source, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for text in (compiler, _run([compiler, "--version"]), *flags, *LINK_FLAGS, *source.versions, _cpu()):
        digest.update(text.encode() + b"\0")
    for path in (*source.units, *source.headers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _cpu_flags() -> tuple[str, ...]:
    if platform.machine() in ("aarch64", "arm64"):
        return ("-mcpu=native",)
    # All instructions of this CPU, but not GCC's cost model of it: that of AMD's Zen reloads operands in every multiply-add.
    return ("-march=native", "-mtune=generic")


def _cpu() -> str:
    """Model and instruction sets of the CPU: a library for one need not run on another."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return "\n".join(f"{name.strip()}:{value.strip()}" for name, value in fields if name.strip() in _CPU_FIELDS)


def _is_intact(library: Path) -> bool:
    try:
        return _digest_file(library).read_text(encoding="ascii") == _digest_of(library)
    except (OSError, UnicodeDecodeError):
        return False


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
