"""The device check: that it runs from end to end, says what is wrong, and keeps to its budget."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import device_check, device_rivals
from benchmarks.device_cases import Case
from pallas_kernels.inspection.calls import OPS, Call, Shape

ROOT = Path(__file__).parents[2]
TINY = Shape(seqs=2, context=32, num_heads=2, num_kv_heads=1, head_dim=64, tokens=8, outputs=128, inputs=128)


@pytest.mark.slow
def test_it_runs_here_and_keeps_to_its_budget(tmp_path: Path) -> None:
    out = tmp_path / "device.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.device_check", "--small", "--budget", "8", "--out", str(out)],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["parity"]
    assert all(row["passed"] for row in report["parity"].values())
    assert report["left_out"], "more than 8 seconds of work is left out"
    assert f"left out: {report['left_out'][-1]}" in done.stdout


def test_every_op_is_checked_and_timed() -> None:
    timed, checked = device_check.timed_cases(device_check.LLAMA), device_check.parity_cases()
    assert {case.op for case in timed} == {case.op for case in checked} == set(OPS)
    assert len({(case.op, case.name) for case in checked}) == len(checked)
    assert len({(case.op, case.name) for case in timed}) == len(timed)


@pytest.mark.parametrize(
    ("op", "changes"),
    [
        ("ragged_paged_attention", {"dtype": "int8"}),
        ("flash_attention", {}),
        ("kv_write", {"dtype": "int8"}),
        ("kv_write", {}),
        ("page_copy", {"dtype": "float8_e4m3fn"}),
        ("quantized_matmul", {"kind": "int4"}),
        ("quantized_matmul", {"kind": "fp8_e4m3"}),
    ],
)  # fmt: skip
def test_a_call_is_timed_beside_its_floor(op: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_check, "ROUNDS", 2)  # what a call gave is given to the next: donated state
    case = Case(op, "", dataclasses.replace(TINY, **changes))
    row = device_check.measure(case, "reference", device_check.CHIPS["v5e"])
    assert row["us"] > 0
    assert row["floor_us"] == pytest.approx(row["of_floor"] * row["us"])
    assert all(isinstance(took, float) and took > 0 for took in row["rivals_us"].values())
    assert bool(row["rivals_us"]) == (op not in ("kv_write", "page_copy"))


def test_rivals_are_timed_once_for_all_pool_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def rival(shape: Shape) -> device_rivals.Timed:
        seen.append(shape)
        return lambda: None

    monkeypatch.setitem(device_rivals.ATTENTION["cpu"], "XLA (dense)", rival)
    call = Call(lambda: None, (), flops=0.0, bytes=0.0)
    monkeypatch.setattr(device_check, "make", lambda *_: (call, ()))
    monkeypatch.setattr(device_check, "repeated", lambda _: lambda: None)
    for dtype in ("bfloat16", "int8"):
        for context in (32, 48):
            shape = dataclasses.replace(TINY, dtype=dtype, context=context)
            device_check.measure(Case("ragged_paged_attention", dtype, shape), "reference", None)
    assert [shape.context for shape in seen] == [32, 48]


def test_the_jsons_of_a_run_hold_what_fails_and_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [Case("kv_write", name, TINY) for name in ("a", "b")]
    monkeypatch.setattr(device_check, "parity_cases", lambda: cases)
    monkeypatch.setattr(device_check, "timed_cases", lambda _: [])

    def check(case: Case, _: str) -> dict[str, Any]:
        if case.name == "a":
            raise ValueError("no such\nkernel")
        return {"error": 0.5, "limit": 0.1, "stray": 2, "unseen": ["x"], "passed": False}

    monkeypatch.setattr(device_check, "check", check)
    report: dict[str, Any] = {"device": "H200", "backend": "reference", "seconds": 0.0}
    report |= {"parity": {}, "times": {}, "left_out": []}
    device_check.work(report, tmp_path / "deep" / "out.json", 60.0, TINY)
    assert json.loads((tmp_path / "deep" / "out.json").read_text()) == report
    rows = report["parity"]
    assert not any(row["passed"] for row in rows.values())
    assert device_check.why_wrong(rows["kv_write: a"]) == "ValueError: no such"
    said = device_check.why_wrong(rows["kv_write: b"])
    assert "error 0.5, limit 0.1; 2 numbers" in said
    assert "not seen: x" in said
    device_check.work(report, tmp_path / "out.json", -1.0, TINY)
    assert report["left_out"] == ["parity of kv_write: a", "parity of kv_write: b"]


FINE = {"passed": True, "error": 0.0, "limit": 0.1, "stray": 0, "unseen": []}


@pytest.mark.parametrize(
    ("parity", "time", "status"),
    [
        (FINE, {"us": 1.0, "rivals_us": {"r": {"failed": "not installed"}}}, 0),
        (FINE | {"error": 0.2, "passed": False}, {"us": 1.0, "rivals_us": {}}, 1),
        (FINE | {"unseen": ["rows swapped"], "passed": False}, {"us": 1.0, "rivals_us": {}}, 1),
        (ValueError("no such kernel"), {"us": 1.0, "rivals_us": {}}, 1),
        (FINE, ValueError("no such kernel"), 1),
        (None, {"us": 1.0, "rivals_us": {}}, 1),
    ],
    ids=[
        "sound",
        "an error",
        "an unseen mistake",
        "a parity case that raises",
        "a timed call that raises",
        "no parity",
    ],
)
def test_the_exit_status_says_whether_all_is_right(
    parity: Any,
    time: Any,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The report is whole and written, whatever it says."""

    def gives(result: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    cases = [Case("kv_write", name, TINY) for name in ("a", "b")]
    monkeypatch.setattr(device_check, "parity_cases", lambda: cases if parity else [])
    monkeypatch.setattr(device_check, "timed_cases", lambda _: cases)
    monkeypatch.setattr(device_check, "check", lambda case, _: gives(parity) if case.name == "a" else FINE)
    monkeypatch.setattr(device_check, "measure", lambda *_: gives(time))
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["device_check", "--backend", "reference", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        device_check.main()
    assert ended.value.code == status
    report = json.loads(out.read_text())
    assert len(report["parity"]) == (2 if parity else 0)
    assert len(report["times"]) == 2
    assert f"parity: {sum(row['passed'] for row in report['parity'].values())} of" in capsys.readouterr().out


def test_a_call_that_hangs_ends_the_program(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    source = (
        "import sys, time; from benchmarks import device_check as d; d.GRACE = 0.0; d.check = lambda *_: time.sleep(99);"
        f"sys.argv = ['', '--small', '--budget', '1', '--backend', 'reference', '--out', {str(out)!r}]; d.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "it did not end" in done.stdout
    assert json.loads(out.read_text())["left_out"]


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["device_check", "--backend", "mosaic"])
    with pytest.raises(SystemExit, match="2"):
        device_check.main()
    assert "invalid choice: 'mosaic'" in capsys.readouterr().err


def test_the_cpu_stays_beside_the_named_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, wanted in (("cuda", "cuda,cpu"), ("cpu", "cpu"), ("tpu,cpu", "tpu,cpu"), (None, None)):
        before = jax.config.jax_platforms
        try:
            jax.config.update("jax_platforms", named)
            device_check._keep_cpu()
            assert jax.config.jax_platforms == wanted
        finally:
            jax.config.update("jax_platforms", before)


def test_the_summary_names_what_failed() -> None:
    report = {
        "device": "chip", "backend": "reference", "seconds": 1.0, "left_out": ["times of x"],
        "parity": {
            "a": {"passed": True, "error": 0.0}, "b": {"passed": False, "error": 0.5, "limit": 0.015, "stray": 3, "unseen": []},
            "c": {"failed": "E: no", "passed": False},
        },
        "times": {"d": {"us": 2.0, "of_floor": 0.5, "rivals_us": {"r": 4.0, "q": {"failed": "E"}}}, "e": {"failed": "E: bad"}},
    }  # fmt: skip
    text = "\n".join(device_check.summary(report))
    for wanted in (
        "1 of 3 pass", "b: error 0.5, limit 0.015; 3 numbers", "c: E: no", "50%  d; r 4.0, q -", "e: E: bad", "left out: times of x",
    ):  # fmt: skip
        assert wanted in text
