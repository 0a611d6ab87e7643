"""Building and caching a native library where compilers, caches and other processes misbehave."""

import ctypes
import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pallas_kernels.native import build as building
from pallas_kernels.native import library
from pallas_kernels.native.build import NativeBuildError, Source, build

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    unit, header = tmp_path / "answer.cc", tmp_path / "number.h"
    header.write_text("#define NUMBER 42\n")
    unit.write_text(
        '#include "number.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return NUMBER; }\n'
    )
    return Source("answer", (unit,), (header,))


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def answer_of(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


def test_builds_once(source: Source, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = build(source, cache)
    assert answer_of(path) == 42
    built = path.stat()
    assert build(source, cache) == path
    assert path.stat().st_mtime_ns == built.st_mtime_ns
    assert not [entry for entry in cache.iterdir() if entry.name.startswith(".build-")]


def test_a_changed_header_version_or_cpu_is_another_library(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    first = build(source, cache)
    source.headers[0].write_text("#define NUMBER 43\n")
    second = build(source, cache)
    assert (answer_of(first), answer_of(second)) == (42, 43)
    newer = build(Source(source.name, source.units, source.headers, versions=("jaxlib 1",)), cache)
    monkeypatch.setattr(building, "_cpu", lambda: "another CPU")
    assert len({first, second, newer, build(source, cache)}) == 4


@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_damaged_library_is_built_again(
    source: Source, tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that is cut short: mapping it would kill the process."""
    path = build(source, tmp_path / "cache")
    path.write_bytes(path.read_bytes()[:5000] if damage is None else damage)
    assert build(source, tmp_path / "cache") == path
    assert answer_of(path) == 42
    assert "building it again" in caplog.text


def test_a_broken_compiler_is_named_in_one_line(source: Source, tmp_path: Path) -> None:
    broken = script(tmp_path / "broken", "echo 'x.cc:1: error: out of\tluck' >&2\necho more >&2\nexit 3")
    with pytest.raises(NativeBuildError) as caught:
        build(source, tmp_path / "cache", compilers=(broken,))
    message = str(caught.value)
    assert broken in message
    assert "\n" not in message


def test_the_compilers_own_complaint_is_shown(source: Source, tmp_path: Path) -> None:
    source.units[0].write_text("this is not C++\n")
    with pytest.raises(NativeBuildError, match=r"exit code \d+: .*error") as caught:
        build(source, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_the_next_compiler_is_tried(source: Source, tmp_path: Path) -> None:
    broken = script(tmp_path / "broken", "exit 1")
    assert answer_of(build(source, tmp_path / "cache", compilers=(broken, *building.COMPILERS))) == 42


def test_no_compiler(source: Source, tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match="no C\\+\\+ compiler was found"):
        build(source, tmp_path / "cache", compilers=("no-such-compiler",))


def test_a_cache_that_cannot_be_written(source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeBuildError, match="cannot be written"):
        build(source, tmp_path / "file" / "cache")


def test_a_read_only_cache_serves_what_it_has(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that cannot be made are simulated: root, as which containers run their tests, may write everywhere."""
    path = build(source, tmp_path / "cache")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    assert build(source, tmp_path / "cache") == path
    source.headers[0].write_text("#define NUMBER 43\n")
    with pytest.raises(NativeBuildError, match="cannot be written: Read-only file system"):
        build(source, tmp_path / "cache")


def test_two_processes_at_once_build_once(source: Source, tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = script(tmp_path / "counting", f'[ "$1" = --version ] || {{ echo x >> {log}; sleep 1; }}\nexec c++ "$@"')
    program = (
        "import sys; from pathlib import Path; from pallas_kernels.native.build import Source, build\n"
        "unit, header, cache, compiler = sys.argv[1:]\n"
        "print(build(Source('answer', (Path(unit),), (Path(header),)), Path(cache), compilers=(compiler,)))"
    )
    arguments = [str(source.units[0]), str(source.headers[0]), str(tmp_path / "cache"), compiler]
    processes = [
        subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    paths = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert paths[0] == paths[1]
    assert answer_of(Path(paths[0])) == 42
    assert log.read_text().split() == ["x", "x"], "one unit was compiled, and one library linked"


def test_a_foreign_library_is_refused(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loads but holds other functions."""
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(library, "source", lambda: source)
    with pytest.raises(NativeBuildError, match="jaxkv_ragged_paged_attention"):
        library.load(tmp_path / "cache")
