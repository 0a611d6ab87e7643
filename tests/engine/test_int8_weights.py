"""Weights in int8: the answers do not depend on company, the bytes are bytes, the text stays as likely."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from fixtures.tiny_engine import TINY, random_params, tiny_engine
from fixtures.workload import mixed_jobs, run_alone, run_together
from oracle.goldens import load_tiny_golden

from jaxkv import ConfigError, Engine, EngineConfig, SamplingParams
from jaxkv.weights.hub import resolve
from jaxkv.weights.load import load_model
from pallas_kernels.quantized_matmul.rotation import rotate_weight
from pallas_kernels.quantized_matmul.weights import QuantizedWeight

JOBS = mixed_jobs(20)


def int8_engine(**settings: object) -> Engine:
    return tiny_engine(quantization="int8", **settings)  # type: ignore[arg-type]


@pytest.mark.needs("float32 pages")  # for equal logprobs
def test_alone_and_in_any_company() -> None:
    """Cold, batched, with the prefix cached, in chunks, after preemption."""
    engine = int8_engine(num_blocks=128)
    alone = run_alone(int8_engine(num_blocks=128, enable_prefix_caching=False), JOBS)
    assert run_together(engine, JOBS) == alone
    assert run_together(engine, JOBS) == alone
    assert run_together(int8_engine(num_blocks=128, max_num_batched_tokens=16), JOBS) == alone
    preempted = int8_engine(num_blocks=16)
    assert run_together(preempted, JOBS) == alone
    assert preempted.stats().num_preemptions > 0


@pytest.mark.needs("float32 pages")  # rounded ones round differently where sums of attention do
@pytest.mark.parametrize("shards", [2, 4])
def test_on_several_devices(shards: int) -> None:
    """To the same numbers, as sums of integers are exact, where each device holds whole blocks of rotated inputs."""
    model = dataclasses.replace(TINY, num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=256)
    # Native code, which multiplies on one device only, rotates in another order than XLA.
    settings = {"model": model, "num_blocks": 128, "attention_backend": "reference"}
    one = int8_engine(**settings)
    assert run_together(int8_engine(**settings, tensor_parallel_size=shards), JOBS) == run_together(one, JOBS)


def test_an_element_is_a_byte() -> None:
    engine = int8_engine()
    weights = engine._runner._params
    for name in ("qkv", "o", "gate_up", "down"):
        values, scales = jax.tree.leaves(weights["layers"][name])
        assert (values.dtype, scales.dtype) == (np.int8, np.float32)
    elements = sum(leaf.size for leaf in jax.tree.leaves(random_params(engine.model_config)))
    scales = sum(leaf.size for leaf in jax.tree.leaves(weights) if leaf.dtype == np.float32)
    assert engine.memory_report().weight_bytes < elements + 4 * scales + 1


def test_loading_quantizes_each_output_by_itself() -> None:
    source = resolve(str(load_tiny_golden("llama3").path))
    whole, small = load_model(source, "float32").params, load_model(source, "float32", "int8").params
    pairs = [(whole["embed"], small["embed"], 1), (whole["lm_head"], small["lm_head"], 1)]
    pairs += [(whole["layers"][n], small["layers"][n], 3 if n == "o" else 1) for n in ("qkv", "o", "gate_up", "down")]
    for weight, quantized, inputs in pairs:
        assert isinstance(quantized, QuantizedWeight)
        rows = weight.reshape(*weight.shape[: weight.ndim - inputs], -1)
        rows = rotate_weight(rows.reshape(-1, rows.shape[-1])).reshape(rows.shape)
        scales = np.abs(rows).max(axis=-1) / 127
        np.testing.assert_allclose(quantized.scales, scales, rtol=1e-6)
        error = np.abs(np.asarray(quantized.values).reshape(rows.shape) * scales[..., None] - rows)
        assert (error <= scales[..., None] * 0.5001).all()


def test_unknown_quantization() -> None:
    with pytest.raises(ConfigError, match="quantization is 'int3': it must be one of int8"):
        EngineConfig(model="x", quantization="int3")  # type: ignore[arg-type]


def perplexity(engine: Engine, ids: list[int], window: int) -> float:
    """exp of the mean negative log-probability over consecutive windows; the first token of each is not scored."""
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    outputs = engine.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0), progress=False)
    values = [entry.logprob for output in outputs for entry in output.prompt_logprobs or [] if entry]
    return math.exp(-sum(values) / len(values))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_perplexity_stays_near_that_of_bfloat16() -> None:
    """Measured: 0.5 % above it. On 20,000 tokens of text that comes with Python: the source of its modules, half of it English."""
    import argparse
    import asyncio
    import collections
    import decimal
    import email
    import logging
    import pathlib
    import random
    import statistics
    import subprocess
    import unittest

    modules = (
        argparse, asyncio, collections, decimal, email, logging, pathlib, random, statistics, subprocess, unittest,
    )  # fmt: skip
    text = "\n\n".join(Path(module.__file__ or "").read_text(encoding="utf-8") for module in modules)

    def measured(quantization: str | None) -> float:
        engine = Engine.from_pretrained(
            "smollm2-135m-instruct",
            quantization=quantization,
            max_model_len=1024,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            compilation_cache_dir="",
        )
        ids = engine.tokenizer.encode(text)[:20_000]
        assert len(ids) == 20_000
        value = perplexity(engine, ids, 1000)
        engine.close()
        return value

    plain, quantized = measured(None), measured("int8")
    assert 1 < plain < 50
    assert quantized == pytest.approx(plain, rel=0.01)
