"""Every backend of flash attention on the same cases, against float64, in interpreters that watch all they can watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.flash_attention_cases import BOUND, CASES, Batch, Case, make_batch, worst_error
from fixtures.gpu_interpreter import gpu_interpreter
from fixtures.hopper_mistakes import give_tiles_back_unread
from fixtures.interpreters import MISUSED_BARRIER
from fixtures.tpu_interpreter import DmaMode, watching

from pallas_kernels.flash_attention import mosaic_gpu, mosaic_gpu_consume, mosaic_tpu, mosaic_tpu_stream
from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.flash_attention.tuning import Blocks, blocks_for
from pallas_kernels.hopper.ring import Ring
from pallas_kernels.scoring import Scoring

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.timeout(300),
    # Rows of padding hold NaN.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]

SMALL = Blocks(rows=64, keys=128, vmem_limit=2**24)
"""Several blocks of queries and of keys, of few tokens."""


def on_xla(batch: Batch, backend: Any = "reference") -> Any:
    q, k, v, q_lens, kv_lens, sinks = batch.arrays
    return flash_attention(q, k, v, q_lens=q_lens, kv_lens=kv_lens, sinks=sinks, **batch.options, backend=backend)


def on_tpu(batch: Batch, dma: DmaMode = "on_wait", blocks: Blocks = SMALL) -> Any:
    def call(*arrays: Any) -> jax.Array:
        return mosaic_tpu.attend(*arrays, scoring=Scoring(**batch.options), blocks=blocks, interpret=watching(dma))

    return jax.jit(call)(*jax.tree.map(jnp.asarray, batch.arrays))


def on_gpu(batch: Batch) -> Any:
    with gpu_interpreter():
        return np.asarray(jax.jit(lambda arrays: on_xla(Batch(arrays, batch.options, batch.expected), "mosaic_gpu"))(
            jax.tree.map(jnp.asarray, batch.arrays)
        ))  # fmt: skip


BACKENDS: dict[str, tuple[Callable[[Batch], Any], tuple[str, ...]]] = {
    "reference": (on_xla, ("float32", "bfloat16", "float16")),
    "mosaic_tpu": (on_tpu, mosaic_tpu.DTYPES),
    "mosaic_gpu": (on_gpu, mosaic_gpu.DTYPES),
}
PAIRS = [(name, case) for name, (_, dtypes) in BACKENDS.items() for case in CASES if case.dtype in dtypes]


def check(case: Case, got: Any, expected: Any) -> None:
    assert got.dtype == case.dtype
    assert worst_error(case, got, expected) < BOUND[case.dtype]


@pytest.mark.parametrize(("backend", "case"), PAIRS, ids=str)
def test_matches_the_dense_oracle(backend: str, case: Case) -> None:
    batch = make_batch(case)
    check(case, BACKENDS[backend][0](batch), batch.expected)


def test_copies_done_at_once() -> None:
    case = Case("eager", ((70, 300), (0, 5), (3, 2)), K=2, window=100)
    batch = make_batch(case)
    check(case, on_tpu(batch, dma="eager"), batch.expected)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_blocks_of_a_chip(head_dim: int) -> None:
    case = Case("blocks of a chip", ((600, 1100),), K=1, G=1, D=head_dim)
    batch = make_batch(case)
    check(case, on_tpu(batch, blocks=blocks_for("TPU v5 lite", head_dim)), batch.expected)


def test_cpu_native_is_the_reference() -> None:
    batch = make_batch(CASES[0])
    np.testing.assert_array_equal(on_xla(batch, "cpu_native"), on_xla(batch))


def test_lengths_are_optional_and_no_longer_than_the_arrays() -> None:
    batch = make_batch(Case("whole", ((72, 136),), K=1, G=1, D=64))
    q, k, v, *_ = batch.arrays
    whole = flash_attention(q, k, v, **batch.options)
    np.testing.assert_array_equal(whole, on_xla(batch))
    longer = flash_attention(q, k, v, q_lens=np.array([99]), kv_lens=np.array([999]), **batch.options)
    np.testing.assert_array_equal(whole, longer)


WATCHED = Case("watched", ((130, 300),), K=1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tile_too_few_is_noticed(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tests, as the next ones: the last block of keys of each block of queries is left out."""
    blocks = Scoring.blocks

    def one_less(self: Scoring, *args: Any) -> Any:
        first, count = blocks(self, *args)
        return first, jnp.maximum(count - 1, 0)

    monkeypatch.setattr(Scoring, "blocks", one_less)
    batch = make_batch(WATCHED)
    assert worst_error(WATCHED, BACKENDS[backend][0](batch), batch.expected) > BOUND["bfloat16"]


@pytest.mark.parametrize(
    ("backend", "owner"), [("mosaic_tpu", mosaic_tpu._Mask), ("mosaic_gpu", mosaic_gpu_consume.Rows)]
)
def test_a_wrong_mask_is_noticed(backend: str, owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key of a masked tile is seen."""
    seen = owner.seen
    monkeypatch.setattr(owner, "seen", lambda *args: seen(*args) | True)
    batch = make_batch(WATCHED)
    assert worst_error(WATCHED, BACKENDS[backend][0](batch), batch.expected) > BOUND["bfloat16"]


def test_a_missing_wait_is_noticed_on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies done at once the numbers are right, and only the race detector can object."""
    monkeypatch.setattr(mosaic_tpu_stream.Stream, "_wait", staticmethod(lambda _: None))
    with pytest.raises(Exception, match="RACE DETECTED"):
        on_tpu(make_batch(WATCHED), dma="eager")


def test_a_missing_wait_is_noticed_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither side waits for the other: what stops with an error leaves nobody waiting for it."""
    for name in ("wait", "claim"):
        monkeypatch.setattr(Ring, name, lambda self, t: self.tiles.at[self.slot(t)])
    with pytest.raises(Exception, match=MISUSED_BARRIER):
        on_gpu(make_batch(WATCHED))


def test_a_tile_given_back_too_early_is_a_race_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    give_tiles_back_unread(monkeypatch)
    with pytest.raises(Exception, match="RACE DETECTED"):
        on_gpu(make_batch(WATCHED))
