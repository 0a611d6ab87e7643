"""An engine whose native CPU code cannot be built or loaded still starts, on XLA, and says so in one line."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# One request, with the log as the server writes it.
PROGRAM = """
import logging
from fixtures.tiny_engine import tiny_engine
from jaxkv import SamplingParams
from jaxkv.cli.log import log_to_stderr
log_to_stderr(logging.INFO)
engine = tiny_engine(max_num_batched_tokens=8)
output = engine.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), progress=False)
print(len(output[0].outputs[0].token_ids))
"""
FIND_LIBRARY = """
from pathlib import Path
from pallas_kernels.native import build, library
source = library.source()
flags = (*build.FLAGS, *build._cpu_flags(), *(f"-I{path}" for path in source.include_dirs))
import os, shutil
compiler = os.path.realpath(next(filter(None, map(shutil.which, build.COMPILERS))))
print(library.default_cache_dir() / f"{source.name}-{build._key(compiler, source, flags)}.so")
"""


def run(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def broken_compiler(folder: Path) -> dict[str, str]:
    """Compilers that fail, first on the PATH."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("c++", "g++", "clang++"):
        script = tools / name
        script.write_text("#!/bin/sh\necho 'error: this compiler is broken' >&2\nexit 1\n")
        script.chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(folder / "cache")}


def unwritable_cache(folder: Path) -> dict[str, str]:
    """A file where the cache directory would be, so that not even root can write there."""
    (folder / "cache").write_text("")
    return {"XDG_CACHE_HOME": str(folder / "cache")}


def foreign_library(folder: Path) -> dict[str, str]:
    """What the cache holds under this machine's name was made by another: whole by its digest, but not loadable here."""
    environment = {"XDG_CACHE_HOME": str(folder / "cache")}
    library = Path(run(FIND_LIBRARY, environment).stdout.strip())
    library.parent.mkdir(parents=True)
    library.write_bytes(b"built for another machine")
    library.with_suffix(".sha256").write_text(hashlib.sha256(library.read_bytes()).hexdigest())
    return environment


@pytest.mark.slow
@pytest.mark.needs("native code")
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (broken_compiler, "error: this compiler is broken"),
        (unwritable_cache, "cannot be written"),
        (foreign_library, "cannot be loaded"),
    ],
)
def test_it_starts_on_xla_and_says_so_once(
    tmp_path: Path, spoil: Callable[[Path], dict[str, str]], reason: str
) -> None:
    if spoil is foreign_library and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("a library is looked for under the name of a compiler, and there is none")
    done = run(PROGRAM, spoil(tmp_path))
    assert done.stdout.strip() == "4"
    lines = [line for line in done.stderr.splitlines() if reason in line]
    assert len(lines) == 1, done.stderr
    assert "attention backend: reference (XLA, as cpu_native cannot be used here: " in lines[0]
