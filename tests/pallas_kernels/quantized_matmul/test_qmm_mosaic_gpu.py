"""What only the Hopper kernel has: split inputs, and warpgroups that wait for each other."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from fixtures.hopper_mistakes import give_tiles_back_unread
from fixtures.interpreters import MISUSED_BARRIER
from fixtures.quantized_matmul_cases import SMALL_TILES, Case, check, make_problem, multiply

from pallas_kernels.hopper.ring import Ring
from pallas_kernels.quantized_matmul.weights import KINDS

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(200)]

SPLIT = dataclasses.replace(SMALL_TILES, blocks=4)
WATCHED = {kind: make_problem(Case("watched", kind, 8, 64, 512)) for kind in ("int8", "int4")}


@pytest.mark.parametrize("kind", KINDS)
def test_two_warpgroups_and_split_inputs(kind: Any) -> None:
    """18 steps over two splits, with a ragged tail of tokens."""
    case = Case("split", kind, 129, 64, 1152, dtype="float32")
    check("mosaic_gpu", case, tuning=dataclasses.replace(SPLIT, warpgroups=2))


def test_int8_is_exact_however_it_is_split() -> None:
    problem = make_problem(Case("exact", "int8", 9, 64, 2048, dtype="float32"))
    np.testing.assert_array_equal(multiply("mosaic_gpu", problem), multiply("mosaic_gpu", problem, tuning=SPLIT))


@pytest.mark.parametrize("kind", WATCHED)
def test_a_missing_wait_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tests, as the next one: neither side waits for the other."""
    for name in ("wait", "claim"):
        monkeypatch.setattr(Ring, name, lambda self, t: self.at(t))
    with pytest.raises(Exception, match=MISUSED_BARRIER):
        multiply("mosaic_gpu", WATCHED[kind])


@pytest.mark.parametrize("kind", WATCHED)
def test_a_tile_given_back_too_early_is_a_race(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    give_tiles_back_unread(monkeypatch)
    with pytest.raises(Exception, match="RACE DETECTED"):
        multiply("mosaic_gpu", WATCHED[kind])
