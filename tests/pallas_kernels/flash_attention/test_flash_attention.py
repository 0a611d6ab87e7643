"""Every backend of flash attention on the same cases, against float64, in interpreters that watch all they can watch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.flash_attention_cases import BOUND, CASES, Case, make_batch, worst_error
from fixtures.tpu_interpreter import DmaMode, watching
from gpu_interpreter import gpu_interpreter

from pallas_kernels.flash_attention import mosaic_gpu, mosaic_tpu
from pallas_kernels.flash_attention.api import check_supported, flash_attention
from pallas_kernels.flash_attention.mosaic_gpu import _Ring
from pallas_kernels.flash_attention.mosaic_tpu_stream import Stream
from pallas_kernels.flash_attention.scoring import Scoring
from pallas_kernels.flash_attention.tuning import Blocks, blocks_for, tiles_for

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.timeout(300),
    # Rows of padding hold NaN.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]

SMALL = Blocks(rows=64, keys=128, vmem_limit=2**24)


def on_reference(batch: Any) -> Any:
    q, k, v, q_lens, kv_lens, sinks = batch.arrays
    return flash_attention(q, k, v, q_lens=q_lens, kv_lens=kv_lens, sinks=sinks, **batch.options)


def on_tpu(batch: Any, dma: DmaMode = "on_wait", blocks: Blocks = SMALL) -> Any:
    def call(*arrays: Any) -> jax.Array:
        scoring = Scoring(**batch.options)
        return mosaic_tpu.attend(*arrays, scoring=scoring, blocks=blocks, interpret=watching(dma))

    return jax.jit(call)(*jax.tree.map(jnp.asarray, batch.arrays))


def on_gpu(batch: Any) -> Any:
    q, k, v, q_lens, kv_lens, sinks = jax.tree.map(jnp.asarray, batch.arrays)

    def call(*arrays: Any) -> jax.Array:
        q, k, v, q_lens, kv_lens, sinks = arrays
        return flash_attention(
            q, k, v, q_lens=q_lens, kv_lens=kv_lens, sinks=sinks, **batch.options, backend="mosaic_gpu"
        )

    with gpu_interpreter():
        return np.asarray(jax.jit(call)(q, k, v, q_lens, kv_lens, sinks))


BACKENDS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "reference": (on_reference, ("float32", "bfloat16", "float16")),
    "mosaic_tpu": (on_tpu, mosaic_tpu.DTYPES),
    "mosaic_gpu": (on_gpu, mosaic_gpu.DTYPES),
}


def check(case: Case, got: Any, expected: Any) -> None:
    error = worst_error(case, got, expected)
    print("ERR", case.name, error)
    assert error < BOUND[case.dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_the_dense_oracle(backend: str, case: Case) -> None:
    run, dtypes = BACKENDS[backend]
    if case.dtype not in dtypes:
        with pytest.raises(ValueError, match=f"{backend}.*not {case.dtype}"):
            check_supported(backend, num_heads=2, num_kv_heads=1, head_dim=64, dtype=case.dtype)
        return
    batch = make_batch(case)
    check(case, run(batch), batch.expected)
