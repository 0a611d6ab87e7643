"""The step profile: which events count as an operation's time."""

from types import SimpleNamespace

import pytest

from benchmarks.step_profile import operation_times


def event(name: str, milliseconds: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, duration_ns=milliseconds * 1e6)


def test_operations_of_all_threads_are_added_and_waits_left_out() -> None:
    lines = [
        SimpleNamespace(name="tf_XLAEigen/1", events=[event("fusion.1", 2), event("ThunkExecutor::Execute", 9)]),
        SimpleNamespace(name="tf_XLAEigen/2", events=[event("fusion.1", 1), event("while.3", 7), event("ffi_call", 4)]),
        SimpleNamespace(name="python", events=[event("fusion.1", 100)]),
    ]
    times = operation_times(SimpleNamespace(planes=[SimpleNamespace(lines=lines)]))
    assert times == {"fusion.1": pytest.approx(3.0), "ffi_call": pytest.approx(4.0)}
    assert times.most_common(1)[0][0] == "ffi_call"
