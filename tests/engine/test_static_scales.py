"""Engines whose quantized pool has static scales: bytes, values, saturation, and no program of their own for each scale."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures.static_scales import scales_file
from fixtures.tiny_engine import TINY, tiny_engine

from jaxkv import ConfigError, Engine, EngineConfig, SamplingParams
from jaxkv.cache.pool import create_pool

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = [5, 9, 33, 2, 77, 13, 40]
L, K = TINY.num_layers, TINY.num_kv_heads
DTYPES = ["int8", "fp8_e4m3", "fp8_e5m2"]
LARGEST = {"int8": 127, "fp8_e4m3": 448, "fp8_e5m2": 57344}


def engine_with(path: Path, dtype: str, scale: float, **settings: Any) -> Engine:
    return tiny_engine(kv_cache_dtype=dtype, kv_cache_scales=scales_file(path, dtype, scale), **settings)


def keys_and_values(engine: Engine) -> np.ndarray:
    """What the pool holds of the prompt, by block."""
    engine.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1), progress=False)
    return engine._runner.read_pages([0])


def answer(engine: Engine) -> tuple[int, ...]:
    return tuple(engine.generate([PROMPT], GREEDY, progress=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_byte_an_element_and_values_within_a_step(tmp_path: Path, dtype: str) -> None:
    exact_engine = tiny_engine(attention_backend="reference", kv_cache_dtype="float32")
    exact = keys_and_values(exact_engine)
    exact_engine.close()
    peak = np.abs(exact).max()
    scale = peak / LARGEST[dtype]
    engine = engine_with(tmp_path / "s.json", dtype, float(scale))
    (group,) = engine._runner.pool
    assert group.pages.nbytes == group.pages.size
    assert group.scales is not None
    assert group.scales.shape == (L, 2, K)
    stored = keys_and_values(engine)
    used = np.asarray(engine._runner.pool[0].scales)[None, :, :, :, None, None]
    # The first layer's keys and values do not depend on what was stored before.
    half_step = used / 2 if dtype == "int8" else np.abs(exact) * {"fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}[dtype]
    smallest_normal = {"int8": 0.0, "fp8_e4m3": 2.0**-6, "fp8_e5m2": 2.0**-14}[dtype]
    limit = np.maximum(half_step, used * smallest_normal / 2) * 1.001
    assert (np.abs(stored - exact) <= limit)[:, 0].all()
    engine.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_scale_is_no_other_program(tmp_path: Path, dtype: str) -> None:
    engine = engine_with(tmp_path / "s.json", dtype, 0.02, enable_prefix_caching=False)
    first = answer(engine)
    runner = engine._runner
    runner.pool = create_pool(
        runner.spec.mesh, runner.spec.layout, runner.num_blocks, np.full((L, 2, K), 1e-6, np.float32)
    )
    second = answer(engine)
    assert engine.stats().recompilations == 0
    assert first != second, "everything saturates at this scale"
    engine.close()


def engine_of_chunks(path: Path, dtype: str, backend: str) -> Engine:
    untied = dataclasses.replace(TINY, tie_embeddings=False)
    return engine_with(path, dtype, 0.02, model=untied, attention_backend=backend, max_num_batched_tokens=8)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [0, 1], ids=["keys", "values"])
def test_keys_and_values_that_the_pool_cannot_hold(tmp_path: Path, dtype: str, value: float, kind: int) -> None:
    engine = engine_of_chunks(tmp_path / "s.json", dtype, "reference")
    layers = engine._runner._params["layers"]
    group = TINY.num_heads // TINY.num_kv_heads
    layers["qkv"] = layers["qkv"].at[1, 0, group + kind, 3, 5].set(value)
    for params in (GREEDY, SamplingParams(max_tokens=0, prompt_logprobs=1)):
        output = engine.generate([[*range(100, 120)]], params, progress=False)[0]
        assert output.outputs[0].finish_reason == "error"
    assert engine.stats().num_blocks_cached == 0
    engine.check()
    engine.close()


@pytest.mark.parametrize("backend", ["reference", "cpu_native"])
def test_a_pool_that_cannot_hold_nan_hides_none(tmp_path: Path, backend: str) -> None:
    """A damaged row of the embedding ends those that use it, in the first chunk of several, and no others."""
    engine = engine_of_chunks(tmp_path / "s.json", "int8", backend)
    fine, bad = [5, 9, 33, 2, 77, 13, 40, 8, 7, 6], [*range(100, 120)]
    healthy = engine.generate([fine], GREEDY, progress=False)[0].outputs
    weights = engine._runner._params
    weights["embed"] = weights["embed"].at[101].set(np.nan)
    outputs = engine.generate([fine, bad], GREEDY, progress=False)
    assert outputs[0].outputs == healthy
    assert outputs[1].outputs[0].finish_reason == "error"
    assert not outputs[1].outputs[0].token_ids
    engine.check()
    engine.close()


def test_tensor_parallel_pools_have_the_scales_of_their_heads(tmp_path: Path) -> None:
    answers = set()
    for shards in (1, 2, 4):
        engine = engine_with(tmp_path / "s.json", "int8", 0.05, tensor_parallel_size=shards)
        answers.add(answer(engine))
        engine.close()
    assert len(answers) == 1


def test_a_pool_made_anew_keeps_its_scales(tmp_path: Path) -> None:
    engine = engine_with(tmp_path / "s.json", "int8", 0.05)
    (group,) = engine._runner.pool
    before = np.asarray(group.scales)
    group.pages.delete()
    assert engine._runner.restore()
    np.testing.assert_array_equal(np.asarray(engine._runner.pool[0].scales), before)
    engine.close()


def test_scales_without_a_quantized_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a quantized pool, but kv_cache_dtype is auto"):
        EngineConfig(model="m", kv_cache_scales="s.json")
