"""The device check: that it runs from end to end, says what is wrong, and keeps to its budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import device_check

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_here_and_keeps_to_its_budget(tmp_path: Path) -> None:
    out = tmp_path / "device.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/device_check.py", "--small", "--budget", "4", "--out", str(out)],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["parity"]
    assert all(row["passed"] for name, row in report["parity"].items() if "float8" not in name)
    assert report["left_out"], "more than 4 seconds of work is left out"
    assert f"left out: {report['left_out'][-1]}" in done.stdout


def test_every_timed_kernel_has_a_rival_or_a_floor() -> None:
    cases = device_check.timed_cases(device_check.SMALL)
    assert {case.op for case in cases} == {case.op for case in device_check.parity_cases()}
    row = device_check.measure(cases[0], "reference", device_check.CHIPS["v5e"])
    assert row["us"] > 0
    assert row["floor_us"] == pytest.approx(row["of_floor"] * row["us"])


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in device_check.parity_cases() if case.op == "quantized_matmul")
    assert device_check.check(case, "reference")["passed"]
    wrong = device_check._reference(case, "reference")
    monkeypatch.setattr(device_check, "_reference", lambda *_: lambda *args: wrong(*args) * 1.1)
    assert not device_check.check(case, "reference")["passed"]


def test_the_summary_names_what_failed() -> None:
    report = {
        "device": "chip", "backend": "reference", "seconds": 1.0, "left_out": ["times of x"],
        "parity": {"a": {"passed": True, "error": 0.0}, "b": {"passed": False, "error": 0.5}, "c": {"failed": "E: no"}},
        "times": {"d": {"us": 2.0, "of_floor": 0.5, "rivals_us": {"r": 4.0, "q": {"failed": "E"}}}, "e": {"failed": "E: bad"}},
    }  # fmt: skip
    text = "\n".join(device_check.summary(report))
    for wanted in ("1 of 3 pass", "b: 0.5", "c: E: no", "50%  d; r 4.0, q -", "e: E: bad", "left out: times of x"):
        assert wanted in text
