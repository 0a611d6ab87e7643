"""The compiled step: the pool stays where it is, and nothing is compiled twice."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from fixtures.tiny_engine import TINY, random_params, tiny_engine

from jaxkv import ConfigError, SamplingParams
from jaxkv.runtime.mesh import build_mesh, put_params
from jaxkv.runtime.runner import Runner
from jaxkv.runtime.step import StepSpec, broken_rows
from jaxkv.runtime.step_batch import empty_batch, make_buckets, no_flags
from pallas_kernels.backends import layout_for

NUM_BLOCKS = 4096
HLO_TYPES = {"float32": "f32", "bfloat16": "bf16", "int8": "s8", "float8_e4m3fn": "u8", "float8_e5m2": "u8"}
"""Of a pool: XLA would move FP8 as float16 where a device has none, for which it converts all of it and back."""


@pytest.mark.parametrize(
    ("shards", "dtype"), [(1, dtype) for dtype in HLO_TYPES] + [(2, "float32"), (2, "float8_e4m3fn")]
)
def test_the_pool_is_aliased_and_never_copied(shards: int, dtype: str) -> None:
    mesh = build_mesh(shards)
    layout = layout_for(
        "reference",
        num_layers=TINY.num_layers,
        num_kv_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        page_size=4,
        dtype=dtype,
        shards=shards,
    )
    buckets = make_buckets(max_num_batched_tokens=16, max_num_seqs=8, max_pages=16)
    runner = Runner(
        StepSpec(TINY, layout, mesh, "reference", "float32"),
        put_params(mesh, TINY, random_params(TINY)),
        buckets,
        NUM_BLOCKS,
    )
    batch = empty_batch(16, 16, 8, no_flags(), trash_page=NUM_BLOCKS, padding_slot=8)
    compiled = runner._step.lower(runner._params, runner.pool, runner._state, batch).compile()
    pool_bytes = (NUM_BLOCKS + 1) * layout.bytes_per_page // shards
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4
    heads = TINY.num_kv_heads // shards
    dims = f"[{TINY.num_layers},{NUM_BLOCKS + 1},2,{heads},4,{TINY.head_dim}]"
    lines = [line for line in compiled.as_text().splitlines() if dims in line]
    assert [line for line in lines if f"{HLO_TYPES[dtype]}{dims}" not in line or " copy(" in line] == []
    assert lines
    runner.close()


def test_pool_and_weights_lie_on_all_devices() -> None:
    engine = tiny_engine(tensor_parallel_size=2)
    (group,) = engine._runner.pool
    assert group.pages.sharding.shard_shape(group.pages.shape)[3] == 1
    assert len(group.pages.sharding.device_set) == 2
    qkv = engine._runner._params["layers"]["qkv"]
    assert qkv.sharding.shard_shape(qkv.shape)[1] == 1
    engine.close()


def test_every_flag_and_shape_was_compiled_by_the_warm_up() -> None:
    engine = tiny_engine(num_blocks=32)
    everything = SamplingParams(
        temperature=0.9, top_k=9, top_p=0.9, min_p=0.01, presence_penalty=0.1, repetition_penalty=1.1, logprobs=20,
        prompt_logprobs=20, logit_bias={3: 1.0}, min_tokens=2, stop=("zz",), seed=1, max_tokens=8, n=3,
    )  # fmt: skip
    for length in (1, 7, 8, 9, 31, 50):
        engine.generate([7] * length, everything)
    engine.generate(["x" * n for n in (1, 5, 9, 20)], everything, progress=False)
    assert engine.stats().recompilations == 0
    jax.jit(lambda x: x + 1)(1.0)  # compilations of other code are not the engine's
    assert engine.stats().recompilations == 0
    engine.close()


def test_too_few_devices() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 64, but only 8 cpu"):
        build_mesh(64)


@pytest.mark.parametrize("vocab", [64, 1024, 50_000])
def test_a_single_logit_that_is_no_number_breaks_its_row(vocab: int) -> None:
    logits = np.random.default_rng(0).standard_normal((8, vocab)).astype(np.float32) * 1e30
    logits[1, 5] = np.nan
    logits[3, -1] = np.inf
    logits[4] = -np.inf
    logits[6, 1:] = -np.inf  # one finite logit is enough to choose from
    np.testing.assert_array_equal(jax.jit(broken_rows)(logits), [False, True, False, True, True, False, False, False])
