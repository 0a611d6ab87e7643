"""The engine on the accelerator kernels, interpreted: the same tokens as on the XLA path."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext

import pytest
from fixtures.tiny_engine import TINY, tiny_engine
from fixtures.workload import answer_of, mixed_jobs
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import backends

MODEL = dataclasses.replace(TINY, num_heads=4, num_kv_heads=2, head_dim=64)
JOBS = mixed_jobs(6, longest_prompt=12, longest_output=5)


@pytest.mark.interpret
@pytest.mark.timeout(600)
def test_mosaic_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts, decodes, a shared prefix; two layers of head_dim 64, pages of 16."""
    traits = dataclasses.replace(backends.TRAITS["mosaic_tpu"], platform=None)
    monkeypatch.setitem(backends.TRAITS, "mosaic_tpu", traits)
    expected = tokens("reference", nullcontext())
    assert tokens("mosaic_tpu", pltpu.force_tpu_interpret_mode()) == expected


def tokens(backend: str, mode: AbstractContextManager[object]) -> object:
    with mode:
        engine = tiny_engine(
            model=MODEL,
            num_blocks=12,
            block_size=16,
            max_num_seqs=4,
            max_num_batched_tokens=8,
            attention_backend=backend,
        )
        # Not through `Engine.check`: the interpreter compiles pieces of its own while it runs.
        jobs = [*JOBS, *JOBS[:2]]
        outputs = engine.generate([job.prompt for job in jobs], [job.params for job in jobs], progress=False)
    return [answer_of(output) for output in outputs]
