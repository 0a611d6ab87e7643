"""What every backend of quantized matmul must hold: each case of one table right by a float64 oracle, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from fixtures import interpreters
from fixtures.quantized_matmul_cases import CASES, Case, Problem, alone, check, make_problem, multiply, why_refused
from hypothesis import given, settings

from pallas_kernels.quantized_matmul.api import BACKENDS, Backend, check_supported
from pallas_kernels.quantized_matmul.weights import KINDS, Kind

# Rows of activations hold NaN.
NAN = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


on = functools.partial(interpreters.on, interpreted=(NAN,))
EACH_BACKEND = pytest.mark.parametrize("backend", [on(backend) for backend in BACKENDS])


@pytest.mark.parametrize(("backend", "case"), [on(b, c) for b in BACKENDS for c in CASES if not why_refused(b, c)])
def test_equals_the_oracle(backend: Backend, case: Case) -> None:
    check_supported(backend, case.kind, out_features=case.out, in_features=case.width, group=case.group)
    check(backend, case)


@pytest.mark.parametrize(("backend", "case"), [on(b, c) for b in BACKENDS for c in CASES if why_refused(b, c)])
def test_what_a_backend_lacks_is_an_error(backend: Backend, case: Case) -> None:
    why = f"backend '{backend}' .*{why_refused(backend, case)}"
    with pytest.raises(ValueError, match=why):
        check_supported(backend, case.kind, out_features=case.out, in_features=case.width, group=case.group)
    with pytest.raises(ValueError, match=why):
        multiply(backend, make_problem(case))


@EACH_BACKEND
def test_int8_rows_are_the_same_alone_and_in_a_batch(backend: Backend) -> None:
    problem = make_problem(Case("batch", "int8", 67, 48, 192, dtype="float32"))
    batch = multiply(backend, problem)
    for rows in (slice(0, 1), slice(2, 66)):
        np.testing.assert_array_equal(multiply(backend, alone(problem, rows)), batch[rows])


@pytest.mark.parametrize(("backend", "kinds"), [("reference", KINDS), ("cpu_native", ("int8",))])
@settings(max_examples=25)
@given(data=st.data())
def test_odd_shapes(backend: Backend, kinds: tuple[Kind, ...], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(kinds))
    group = 32 if kind == "int4" else 1
    T, out, groups = (data.draw(st.integers(1, most)) for most in (150, 120, 300 // group))
    dtypes = data.draw(st.tuples(*[st.sampled_from(["bfloat16", "float32"])] * 2))
    rotated = data.draw(st.booleans()) and kind == "int8"
    stacked = data.draw(st.booleans())
    check(backend, Case("", kind, T, out, groups * group, 32, *dtypes, stacked=stacked, rotated=rotated))


WATCHED = {
    "int8": Case("watched", "int8", 20, 64, 256, rotated=True),
    "fp8_e4m3": Case("watched", "fp8_e4m3", 20, 64, 256),
    "int4": Case("watched", "int4", 20, 64, 256),
}


def mistakes(problem: Problem) -> dict[str, dict[str, Any]]:
    """Arguments that are wrong in one thing."""
    weight = problem.arguments["weight"]
    changed = {
        "scales 5 % too large": {"scales": weight.scales * np.float32(1.05)},
        "scales of other outputs": {"scales": np.roll(weight.scales, 1, axis=-1)},
        "bytes of other outputs": {"values": np.roll(weight.values, 1, axis=-2)},
        "wrong rotation": {"rotated": not weight.rotated},
    }
    if weight.kind == "int4":
        changed["zero points one too large"] = {"zero_points": weight.zero_points + np.uint8(1)}
    others = {name: {"weight": weight.replace(**fields)} for name, fields in changed.items()}
    return {"wrong layer": {"layer": np.int32((problem.arguments["layer"] + 1) % 3)}, **others}


@pytest.mark.parametrize(
    ("backend", "kind"), [on(b, kind) for b in BACKENDS for kind, case in WATCHED.items() if not why_refused(b, case)]
)
def test_a_planted_mistake_is_noticed(backend: Backend, kind: str) -> None:
    """A test of the test: a call that is wrong in one thing differs from the oracle."""
    problem = make_problem(WATCHED[kind])
    problem.expected.check(multiply(backend, problem))
    for name, change in mistakes(problem).items():
        assert problem.expected.why_wrong(multiply(backend, problem, **change)), name
