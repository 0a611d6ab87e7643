"""The command line: what is given reaches the engine, and what goes wrong is one line and an exit code."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixtures.live_server import live_server
from fixtures.scripted_engine import ScriptedEngine, say
from fixtures.tiny_engine import tiny_engine

import jaxkv
from jaxkv.cli.app import run
from jaxkv.cli.generate import generate
from jaxkv.cli.serve import serve
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from server.port import bind

ROOT = Path(__file__).parents[2]
COMMANDS = {"serve": serve, "generate": generate}


def complaint(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> str:
    assert run(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("jaxkv: error: ")
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sreve"], 2, "No such command"),
        (["serve", "--no-such-flag"], 2, "no such option"),
        (["serve", "--port", "70000"], 2, "--port"),
        (["serve", "--port", "many"], 2, "--port"),
        (["serve", "a", "--model", "b"], 2, "give one of them"),
        (["serve", "--api-key", ""], 2, "--api-key is empty"),
        (["serve", "--dtype", "float8"], 1, "dtype is 'float8'"),
        (["serve", "--max-num-seqs", "0"], 1, "max_num_seqs is 0"),
        (["serve", "--gpu-memory-utilization", "1.5"], 1, "memory_utilization is 1.5"),
        (["generate", "x", "--raw", "--system", "y"], 2, "--system"),
        (["generate", ""], 2, "the prompt is empty"),
        (["bench", "serve", "--port", "1"], 1, "cannot connect to http://127.0.0.1:1"),
        (["bench", "serve", "--request-rate", "0"], 2, "--request-rate"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str) -> None:
    assert message.lower() in complaint(capsys, arguments, code).lower()


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as sock:
        port = str(sock.getsockname()[1])
        assert f"port {port}: Address already in use" in complaint(capsys, ["serve", "--port", port], 1)


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "serve" in capsys.readouterr().out
    assert run(["--help"]) == 0


def test_every_flag_of_serve_reaches_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def fake_server(sock: Any, load: Any, settings: Any) -> int:
        sock.close()
        seen["settings"] = settings
        load()
        return 7

    monkeypatch.setattr("server.launch.serve", fake_server)
    monkeypatch.setattr("jaxkv.engine.build.build_engine", lambda config: seen.setdefault("config", config))
    monkeypatch.setattr("jaxkv.engine.async_engine.AsyncEngine", lambda engine: engine)
    flags = {
        "--served-model-name": "name",
        "--dtype": "float32",
        "--max-model-len": "100",
        "--max-num-seqs": "3",
        "--max-num-batched-tokens": "64",
        "--block-size": "8",
        "--memory-utilization": "0.5",
        "--kv-cache-memory-bytes": "1000000",
        "--kv-cache-dtype": "int8",
        "--kv-cache-scales": "scales.json",
        "--scheduling-policy": "priority",
        "--tensor-parallel-size": "2",
        "--attention-backend": "reference",
        "--max-queued-requests": "9",
        "--chat-template": "t.jinja",
        "--seed": "4",
        "--compilation-cache-dir": "",
        "--api-key": "k",
        "--shutdown-timeout": "2.5",
        "--port": "0",
    }
    arguments = [word for pair in flags.items() for word in pair]
    assert run(["serve", "--model", "some/model", "--no-enable-prefix-caching", *arguments]) == 7
    assert seen["config"] == EngineConfig(
        model="some/model",
        served_model_name="name",
        dtype="float32",
        max_model_len=100,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        block_size=8,
        memory_utilization=0.5,
        kv_cache_memory_bytes=1_000_000,
        kv_cache_dtype="int8",
        kv_cache_scales="scales.json",
        enable_prefix_caching=False,
        scheduling_policy="priority",
        tensor_parallel_size=2,
        attention_backend="reference",
        max_queued_requests=9,
        chat_template="t.jinja",
        seed=4,
        compilation_cache_dir="",
    )
    assert (seen["settings"].api_key, seen["settings"].shutdown_timeout) == ("k", 2.5)
    del seen["config"]
    assert run(["serve", "--port", "0"]) == 7
    assert seen["config"] == EngineConfig(model="smollm2-135m-instruct")


def test_generate_streams_a_chat_a_raw_text_and_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tiny_engine()
    configs: list[EngineConfig] = []
    monkeypatch.setattr("jaxkv.engine.build.build_engine", lambda config: configs.append(config) or engine)
    params = engine.default_sampling_params(max_tokens=8, temperature=0)

    def expected(prompt: Any) -> str:
        return engine.generate(prompt, params, progress=False)[0].outputs[0].text + "\n"

    options = ["--max-tokens", "8", "--temperature", "0", "--model", "m"]
    assert run(["generate", "hi", *options]) == 0
    assert capsys.readouterr().out == expected([{"role": "user", "content": "hi"}])
    assert run(["generate", "hi", "--raw", *options]) == 0
    assert capsys.readouterr().out == expected("hi")
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    assert run(["generate", "-", "--raw", *options]) == 0
    assert capsys.readouterr().out == expected("from stdin")
    assert configs[0].model == "m"


ONLY_FOR_MANY_REQUESTS = {
    "served_model_name",
    "max_num_seqs",
    "scheduling_policy",
    "max_queued_requests",
    "enable_prefix_caching",
}


def test_generate_builds_the_engine_with_the_options_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those that one prompt has no use for, and the seed, which is the prompt's there."""
    seen: list[EngineConfig] = []

    def stop(config: EngineConfig) -> None:
        seen.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr("jaxkv.engine.build.build_engine", stop)
    flags = {
        "--dtype": "float32",
        "--quantization": "int8",
        "--max-model-len": "100",
        "--max-num-batched-tokens": "64",
        "--block-size": "8",
        "--memory-utilization": "0.5",
        "--kv-cache-memory-bytes": "1000000",
        "--kv-cache-dtype": "int8",
        "--kv-cache-scales": "scales.json",
        "--tensor-parallel-size": "2",
        "--attention-backend": "reference",
        "--chat-template": "t.jinja",
        "--compilation-cache-dir": "",
    }
    assert run(["generate", "x", "--model", "m", *(word for pair in flags.items() for word in pair)]) == 1
    assert seen == [
        EngineConfig(
            model="m",
            max_num_seqs=1,
            dtype="float32",
            quantization="int8",
            max_model_len=100,
            max_num_batched_tokens=64,
            block_size=8,
            memory_utilization=0.5,
            kv_cache_memory_bytes=1_000_000,
            kv_cache_dtype="int8",
            kv_cache_scales="scales.json",
            tensor_parallel_size=2,
            attention_backend="reference",
            chat_template="t.jinja",
            compilation_cache_dir="",
        )
    ]
    of_engine = {field.name for field in dataclasses.fields(EngineConfig)}
    options = {name: set(inspect.signature(command).parameters) & of_engine for name, command in COMMANDS.items()}
    assert options["serve"] - options["generate"] == ONLY_FOR_MANY_REQUESTS


def test_bench_prints_the_report_and_saves_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with live_server(ScriptedEngine(say("abcd"))) as url:
        arguments = ["--base-url", url, "--num-prompts", "5", "--input-len", "10", "--output-len", "4"]
        more = ["--vocab-size", "256", "--result-filename", str(path), "--random-input-len", "12"]
        assert run(["bench", "serve", *arguments, *more]) == 0
    out = capsys.readouterr().out
    assert "Successful requests:                     5" in out
    saved = json.loads(path.read_text())
    assert (saved["completed"], saved["input_lens"], saved["model_id"]) == (5, [12] * 5, "scripted")


def test_models_lists_the_catalog(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    assert "smollm2-135m-instruct" in capsys.readouterr().out


def test_python_dash_m_is_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxkv", "serve", "--dtype", "x"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "jaxkv: error: dtype is 'x': it must be one of auto, bfloat16, float32\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxkv {jaxkv.__version__}\n"
