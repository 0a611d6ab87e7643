"""What every backend of KV write must hold: bit for bit what NumPy stores, scales included, and nothing else in the pool changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.interpreters import on
from fixtures.kv_write_cases import LAYER, Case, Write, make_write, program_of, run, wrong_parts
from fixtures.tpu_interpreter import DmaMode
from jax import lax

from pallas_kernels.backends import BACKENDS, Backend
from pallas_kernels.kv_layout import read_pages
from pallas_kernels.kv_write import mosaic_tpu
from pallas_kernels.ragged_paged_attention import cpu_native, mosaic_gpu_common, mosaic_tpu_plan

MANY = ((3, 1), (90, 300))
"""More than the 128 lanes of a TPU, and twice as many."""
CASES = (
    Case("float32", page=32, rows="float32"),
    Case("float32", page=8),
    Case("bfloat16", K=8),
    Case("bfloat16", K=2, D=128, page=128, rows="float32"),
    Case("bfloat16", K=1, page=8),
    Case("float16", K=1, rows="float16"),
    Case("int8", "token", K=2, D=256),
    Case("int8", "token", K=8, page=128, rows="float32"),
    Case("int8", "token", K=3, page=16),
    Case("int8", "token", K=2, page=8, rows="float32"),
    Case("int8", "static", K=4, page=64),
    Case("int8", "token", K=1, page=128, chunks=MANY),
    Case("float8_e4m3fn", "token", K=3, D=128, page=64),
    Case("float8_e4m3fn", "token", K=2, page=64),
    Case("float8_e4m3fn", "static", K=1, rows="float32"),
    Case("float8_e5m2", "token", K=4, page=128),
    Case("float8_e5m2", "token", K=1, page=256, chunks=MANY),
    Case("float8_e5m2", "static", K=2, D=128),
    Case("int8", "token", chunks=()),
    Case("bfloat16", chunks=()),
)
DTYPES: dict[Backend, tuple[str, ...]] = {
    "cpu_native": cpu_native.KV_DTYPES,
    "mosaic_tpu": mosaic_tpu_plan.DTYPES,
    "mosaic_gpu": mosaic_gpu_common.KV_DTYPES,
}


def _takes(backend: Backend, case: Case) -> bool:
    """Whether an engine may have such a pool: those of TPUs have pages of whole tiles. Many tokens are for their lanes."""
    if backend == "mosaic_tpu" and case.page % 16:
        return False
    if backend == "mosaic_gpu" and case.chunks == MANY:
        return False
    return case.dtype in DTYPES.get(backend, (case.dtype,))


def _suite() -> list[Any]:
    modes: dict[Backend, tuple[DmaMode, ...]] = {"mosaic_tpu": ("on_wait", "eager")}
    return [
        on(backend, case, dma)
        for backend in BACKENDS
        for case in CASES
        if _takes(backend, case)
        for dma in modes.get(backend, ("on_wait",))
    ]


@pytest.mark.parametrize(("backend", "case", "dma"), _suite())
def test_stores_what_numpy_stores(backend: Backend, case: Case, dma: DmaMode) -> None:
    write = make_write(case, backend)
    assert not wrong_parts(write, dma)


APART = Case("int8", "token", chunks=((5, 1), (0, 1), (15, 1), (8, 1)))
"""Each token on its own page."""
APART_FP8 = replace(APART, dtype="float8_e4m3fn")
MISTAKES = {
    "wrong place": ("pages", "scales"), "wrong page": ("pages", "scales"), "wrong layer": ("pages", "scales"),
    "keys for values": ("pages", "scales"), "another head": ("pages", "scales"), "wrong scale": ("scales",),
    "wrong number": ("pages",),
}  # fmt: skip
"""And where they show."""


def _mistaken(write: Write, mistake: str) -> Write:
    """A call that is wrong in one thing, for one token where that is possible."""
    [t, u] = np.flatnonzero(write.pages != write.pages.max())[:2]
    pages, offsets, keys, values = (part.copy() for part in (write.pages, write.offsets, write.keys, write.values))
    offsets[t] ^= 1
    pages[[t, u]] = pages[[u, t]]
    values[t, 0] *= 2
    keys[t, 1, 7] = -keys[t, 1, 7]
    changes: dict[str, dict[str, Any]] = {
        "wrong place": {"offsets": offsets},
        "wrong page": {"pages": pages},
        "wrong layer": {"layer": 1 - LAYER},
        "keys for values": {"keys": write.values, "values": write.keys},
        "another head": {"keys": write.keys[:, ::-1]},
        "wrong scale": {"values": values},
        "wrong number": {"keys": keys},
    }
    return replace(write, **changes[mistake])


@pytest.mark.parametrize("backend", [on(backend) for backend in BACKENDS])
def test_planted_mistakes_are_noticed(backend: Backend) -> None:
    """A test of the test. Twice a row has the same numbers, and another scale."""
    write = make_write(APART, backend)
    program = program_of(write)
    assert not wrong_parts(write, program=program)
    for mistake, parts in MISTAKES.items():
        assert wrong_parts(_mistaken(write, mistake), program=program) == {*parts}, mistake


@pytest.mark.parametrize(
    ("backend", "case"),
    [on(backend, case) for backend in BACKENDS for case in (APART, APART_FP8) if _takes(backend, case)],
)
def test_what_is_not_finite_is_read_back_so(backend: Backend, case: Case) -> None:
    """Scales per token hide neither NaN nor infinity, and their neighbours stay what they are."""
    write = make_write(case, backend)
    real = np.flatnonzero(write.pages != write.pages.max())
    write.keys[real[:3], 0, 5] = np.nan, np.inf, -np.inf
    found = jax.tree.map(jnp.asarray, run(write))
    layer, pages = jnp.int32(LAYER), jnp.asarray(write.pages[real])
    keys, values = read_pages(found, layer, pages, write.layout, jnp.dtype(jnp.float32))
    rows = np.arange(len(real)), slice(None), write.offsets[real]
    assert np.isfinite(np.asarray(keys)[rows]).all(-1).tolist() == [[False, True]] * 3 + [[True, True]]
    assert np.isfinite(np.asarray(values)[rows]).all()


@pytest.mark.interpret
@pytest.mark.parametrize("backend", ["mosaic_gpu", "mosaic_tpu"])
def test_a_planted_race_is_caught(backend: Backend) -> None:
    """Two tokens for one place, with another between them."""
    write = make_write(APART, backend)
    first, _, third, *_ = np.flatnonzero(write.pages != write.pages.max())
    write.pages[first], write.offsets[first] = write.pages[third], write.offsets[third]
    with pytest.raises(Exception, match="RACE DETECTED"):
        run(write)


@pytest.mark.interpret
def test_a_missing_wait_is_caught_on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies done at once the numbers are right, and only the race detector can object."""

    def begin(self: Any, i: Any) -> None:
        for copy in self.reads(i, lax.rem(i, mosaic_tpu.SLOTS)):
            copy.start()

    monkeypatch.setattr(mosaic_tpu._Pass, "begin", begin)
    with pytest.raises(Exception, match="RACE DETECTED"):
        run(make_write(Case("bfloat16"), "mosaic_tpu"), dma="eager")


def test_few_numbers_may_be_rounded_either_way() -> None:
    """Where XLA multiplies by a reciprocal: next to the middle between two neighbours, and nowhere else."""
    for case in CASES:
        low, high = (pool.pages for pool in make_write(case, "reference").expected)
        differ = (low.view(np.uint8) != high.view(np.uint8)).mean()
        assert differ < 1e-3, case
        assert differ == 0 or case.scales != "none"
