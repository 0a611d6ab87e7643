"""The engine on the accelerator kernels, interpreted: logprobs of prompts, and a quantized pool on two devices.

What batches, chunks, caching and preemption must not change is in `test_determinism`.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import AbstractContextManager, nullcontext

import pytest
from fixtures.gpu_interpreter import gpu_interpreter
from fixtures.tiny_engine import TINY, tiny_engine
from jax.experimental.pallas import tpu as pltpu

from jaxkv import RequestOutput, SamplingParams
from pallas_kernels import backends
from pallas_kernels.backends import Backend
from pallas_kernels.ragged_paged_attention import mosaic_gpu

MODEL = dataclasses.replace(TINY, num_heads=4, num_kv_heads=2, head_dim=64)
PROMPTS = ("bcb  ggeee", "hbec fbceaaade ")
"""Those after which the model is decided: its best token leads by far, three times over, whatever the pool's dtype."""
GREEDY = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
CLOSE = 0.15
"""Between logprobs: the kernels round queries and probabilities to 16 bits, the XLA path on a CPU does not."""


@pytest.mark.interpret
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_mosaic_gpu(kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts and decodes, with pages written, quantized and read by the Hopper kernels."""
    anywhere("mosaic_gpu", monkeypatch)
    monkeypatch.setattr(mosaic_gpu, "attend", functools.partial(mosaic_gpu.attend, num_sms=1))
    check_outputs("mosaic_gpu", gpu_interpreter(), PROMPTS, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.interpret
@pytest.mark.timeout(600)
def test_mosaic_tpu_with_an_int8_pool_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device holds one KV head, and its scales."""
    anywhere("mosaic_tpu", monkeypatch)
    mode = pltpu.force_tpu_interpret_mode()
    check_outputs("mosaic_tpu", mode, PROMPTS[:1], kv_cache_dtype="int8", tensor_parallel_size=2)


def anywhere(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the backend be chosen on CPU devices, where it is interpreted."""
    monkeypatch.setitem(backends.TRAITS, backend, dataclasses.replace(backends.TRAITS[backend], platform=None))


def check_outputs(
    backend: Backend, mode: AbstractContextManager[object], prompts: tuple[str, ...], **settings: object
) -> None:
    expected = outputs("reference", nullcontext(), prompts, **settings)
    for found, wanted in zip(outputs(backend, mode, prompts, **settings), expected, strict=True):
        check_logprobs(found, wanted)


def outputs(
    backend: Backend, mode: AbstractContextManager[object], prompts: tuple[str, ...], **settings: object
) -> list[RequestOutput]:
    with mode:
        engine = tiny_engine(
            model=MODEL,
            num_blocks=8,
            block_size=16,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            attention_backend=backend,
            **settings,
        )
        return engine.generate(list(prompts), GREEDY, progress=False)


def check_logprobs(found: RequestOutput, wanted: RequestOutput) -> None:
    """Equal tokens, and close logprobs of the prompt and of those tokens. The second token on come from decode steps."""
    scored = [entry.logprob for entry in found.prompt_logprobs or () if entry]
    assert scored == pytest.approx([entry.logprob for entry in wanted.prompt_logprobs or () if entry], abs=CLOSE)
    assert len(scored) == len(wanted.prompt_token_ids) - 1
    mine, theirs = found.outputs[0].logprobs or (), wanted.outputs[0].logprobs or ()
    assert len(mine) == len(theirs) == GREEDY.max_tokens
    for (_, best), (_, second) in (entry.top for entry in theirs):
        # Else equal tokens would be luck: choose other prompts.
        assert best - second > 4 * CLOSE
    assert [entry.token_id for entry in mine] == [entry.token_id for entry in theirs]
    assert [entry.logprob for entry in mine] == pytest.approx([entry.logprob for entry in theirs], abs=CLOSE)
