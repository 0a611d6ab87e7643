"""The engine on the accelerator kernels, interpreted: the same tokens as on the XLA path."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import AbstractContextManager, nullcontext

import pytest
from fixtures.gpu_interpreter import gpu_interpreter
from fixtures.tiny_engine import TINY, tiny_engine
from fixtures.workload import answer_of, mixed_jobs
from jax.experimental.pallas import tpu as pltpu

from jaxkv import RequestOutput, SamplingParams
from pallas_kernels import backends
from pallas_kernels.ragged_paged_attention import mosaic_gpu

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


PROMPTS = ("abc cba ab", "hello, hello")
GREEDY = SamplingParams(temperature=0, max_tokens=2, logprobs=2, prompt_logprobs=1, ignore_eos=True)
CLOSE = 0.15
"""Between logprobs: the kernels round queries and probabilities to 16 bits, the XLA path on a CPU does not."""


@pytest.mark.interpret
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_mosaic_gpu(kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with pages written, quantized and read by the Hopper kernels."""
    traits = dataclasses.replace(backends.TRAITS["mosaic_gpu"], platform=None)
    monkeypatch.setitem(backends.TRAITS, "mosaic_gpu", traits)
    monkeypatch.setattr(mosaic_gpu, "attend", functools.partial(mosaic_gpu.attend, num_sms=1))
    expected = outputs("reference", nullcontext(), kv_cache_dtype)
    for found, wanted in zip(outputs("mosaic_gpu", gpu_interpreter(), kv_cache_dtype), expected, strict=True):
        check_logprobs(found, wanted)


def outputs(backend: str, mode: AbstractContextManager[object], kv_cache_dtype: str) -> list[RequestOutput]:
    with mode:
        engine = tiny_engine(
            model=MODEL,
            num_blocks=8,
            block_size=16,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            attention_backend=backend,
            kv_cache_dtype=kv_cache_dtype,
        )
        return engine.generate(list(PROMPTS), GREEDY, progress=False)


def check_logprobs(found: RequestOutput, wanted: RequestOutput) -> None:
    """Equal tokens up to the first that the model is undecided about; close logprobs of the prompt and of those tokens."""
    scored = [entry.logprob for entry in found.prompt_logprobs or () if entry]
    assert scored == pytest.approx([entry.logprob for entry in wanted.prompt_logprobs or () if entry], abs=CLOSE)
    for mine, theirs in zip(found.outputs[0].logprobs or (), wanted.outputs[0].logprobs or (), strict=True):
        (_, best), (_, second) = theirs.top
        if best - second < 2 * CLOSE:
            break
        assert mine.token_id == theirs.token_id
        assert mine.logprob == pytest.approx(theirs.logprob, abs=CLOSE)
