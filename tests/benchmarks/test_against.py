"""Servers taking turns: the order, the prompts, and that work which is not the work asked for is refused."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures.live_server import live_server
from fixtures.scripted_engine import ScriptedEngine, say

from benchmarks.against import WARM_UP, WARM_UP_SEED, Load, check, measure_server, seed_of, turns
from benchmarks.machine import has_amx
from benchmarks.servers import PEERS, Server, command_line, hf_directory, jaxkv_variants, peers, running
from jaxkv.bench.events import Outcome
from jaxkv.bench.workload import BenchmarkError
from jaxkv.weights.source import ModelSource

LOAD = Load(concurrencies=(1, 3), num_prompts=6, input_len=10, output_len=6, vocab=(0, 256))
GOOD = Outcome(prompt_tokens=10, output_tokens=6, counted=True)


def server(name: str, *command: str) -> Server:
    return Server(name, "bfloat16", "1", command, "/ready")


def quiet(line: str) -> None:
    pass


def test_rounds_are_interleaved() -> None:
    order = [(number, one.name) for number, one in turns([server("a"), server("b")], 3)]
    assert order == [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a"), (3, "b")]


def test_seeds_differ_between_rounds_and_concurrencies_only() -> None:
    seeds = [seed_of(number, limit) for number in range(1, 10) for limit in (1, 8, 32, 256)]
    assert len({*seeds, *(WARM_UP_SEED + number for number in range(1, 10))}) == len(seeds) + 9


def test_runs_take_about_the_same_time() -> None:
    assert [Load().prompts_at(limit) for limit in (1, 8, 32, 128)] == [12, 48, 96, 128]


def test_every_server_gets_the_same_prompts_and_no_prompt_twice() -> None:
    seen = []
    for _ in range(2):
        engine = ScriptedEngine(say("a" * 20))
        with live_server(engine) as url:
            runs = [run for number in (1, 2) for run in measure_server("x", url, number, LOAD, quiet)]
        seen.append(sorted(request.prompt_token_ids for request in engine.requests))
        assert all(request.params.ignore_eos for request in engine.requests if request.params.max_tokens == 6)
    assert seen[0] == seen[1]
    probes = 2 * 3
    assert len(set(seen[0])) == len(seen[0]) == 2 * (WARM_UP["num_prompts"] + 2 * 6) + probes
    assert [(run["max_concurrency"], run["num_prompts"], run["total_output_tokens"]) for run in runs[:2]] == [
        (1, 6, 36),
        (3, 6, 36),
    ]


def test_a_server_that_stops_early_is_not_compared() -> None:
    with (
        live_server(ScriptedEngine(say("aaa"))) as url,
        pytest.raises(BenchmarkError, match="3 output tokens instead of 6"),
    ):
        measure_server("x", url, 1, LOAD, quiet)


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (replace(GOOD, error="HTTP 500"), "a request failed: HTTP 500"),
        (replace(GOOD, counted=False), "does not tell how many tokens"),
        (replace(GOOD, prompt_tokens=11), "11 prompt tokens instead of 10"),
        (replace(GOOD, output_tokens=7), "7 output tokens instead of 6"),
    ],
)
def test_what_is_checked(outcome: Outcome, complaint: str) -> None:
    check("x", [GOOD, GOOD], LOAD)
    with pytest.raises(BenchmarkError, match=f"^x.*{complaint}"):
        check("x", [GOOD, outcome], LOAD)


ANSWERS = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" and os.environ["GREETING"] == "hello" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_started_on_a_port_of_its_own_and_stopped() -> None:
    one = replace(server("x", sys.executable, "-c", ANSWERS, "{port}"), environment={"GREETING": "hello"})
    with running(one) as (url, seconds), running(one) as (other, _):
        assert url != other
        assert 0 < seconds < 60
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/ready", timeout=10)


def test_a_server_that_does_not_start_is_told_with_its_log() -> None:
    program = "print('first'); raise SystemExit('no such model')"
    complaint = r"x ended with exit code 1 before it was ready(.|\n)*no such model"
    with pytest.raises(BenchmarkError, match=complaint), running(server("x", sys.executable, "-c", program)):
        pass


def test_peers_that_are_unknown_or_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.servers.ROOT", tmp_path)
    with pytest.raises(BenchmarkError, match=r"--against names 'sglang': it takes llama.cpp, vllm"):
        peers("llama.cpp,sglang", "m")
    for name in PEERS:
        with pytest.raises(BenchmarkError, match="make bench-peers"):
            peers(name, "m")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Both peers, as far as the commands that start them go, and a model as a GGUF file."""
    for environment in (".venv-llamacpp", ".venv-vllm"):
        (tmp_path / environment).mkdir()
        (tmp_path / environment / ".done").touch()
    monkeypatch.setattr("benchmarks.servers.ROOT", tmp_path)
    monkeypatch.setattr("benchmarks.servers._ask", lambda *_: "answer")
    source = ModelSource("gguf", tmp_path / "tiny.Q4_1.gguf", "m")
    monkeypatch.setattr("benchmarks.servers.resolve", lambda _: source)
    monkeypatch.setattr("benchmarks.servers.hf_directory", lambda _: tmp_path / "hf")
    monkeypatch.setattr("benchmarks.servers.cpus", lambda: [2, 3, 5])
    return tmp_path


@pytest.mark.parametrize("amx", [True, False])
def test_how_the_peers_are_started(installed: Path, monkeypatch: pytest.MonkeyPatch, amx: bool) -> None:
    monkeypatch.setattr("benchmarks.servers.has_amx", lambda: amx)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    first, second = peers("llama.cpp,vllm", "m")
    assert (first.name, first.weights, second.name, second.weights) == ("llama.cpp", "GGUF Q4_1", "vLLM", "bfloat16")
    assert ("--no-repack" in first.command) == amx
    assert first.command[first.command.index("--ctx-size") + 1] == str(32 * 2048)
    assert second.environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,3,5"
    ours = jaxkv_variants("m")
    assert [one.weights for one in ours] == ["bfloat16", "int8"]
    for flag in ("--max-model-len", "--max-num-seqs", "--kv-cache-memory-bytes"):
        values = {one.command[one.command.index(flag) + 1] for one in [*ours, second]}
        assert len(values) == 1
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    assert peers("vllm", "m")[0].environment["VLLM_CPU_OMP_THREADS_BIND"] == "auto"


def test_llama_cpp_needs_a_gguf_file(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.servers.resolve", lambda _: ModelSource("hf_dir", installed, "m"))
    with pytest.raises(BenchmarkError, match=r"llama\.cpp needs a GGUF file, and m is"):
        peers("llama.cpp", "m")


def test_a_hugging_face_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert hf_directory(ModelSource("hf_dir", tmp_path, "m")) == tmp_path


def test_commands_are_shown_without_this_machine() -> None:
    one = server("x", "/a/b/python", "-m", "jaxkv", "serve", "/m n", "--port", "{port}", "--x")
    assert command_line(replace(one, environment={"CPUS": "0,1"})) == "CPUS=0,1 python -m jaxkv serve 'm n' --x"


def test_amx_is_read_from_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("flags\t: avx512f amx_bf16 amx_tile amx_int8\n")
    assert has_amx(path)
    path.write_text("flags\t: avx512f avx512_vnni\n")
    assert not has_amx(path)
    assert not has_amx(tmp_path / "none")
