"""Fitting heads to a tensor-parallel size leaves the model's output as it was."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.tiny_engine import TINY, random_params
from jaxtyping import Array

from jaxkv.core.errors import ConfigError
from jaxkv.models import decoder
from jaxkv.models.config import ModelConfig
from jaxkv.models.params import Params
from jaxkv.runtime.head_split import check_rotated, split_heads, split_params


def model(num_heads: int, num_kv_heads: int) -> ModelConfig:
    return dataclasses.replace(TINY, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=90)


def dense_attention(cache: None, layer: Array, q: Array, k: Array, v: Array) -> tuple[None, Array]:
    scores = jnp.einsum("tkgd,skd->kgts", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones((q.shape[0], q.shape[0]), bool))
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return None, jnp.einsum("kgts,skd->tkgd", weights / weights.sum(-1, keepdims=True), v)


def hidden(config: ModelConfig, params: Params) -> np.ndarray:
    tokens = jnp.array([5, 200, 31, 31, 90])
    params = jax.tree.map(jnp.asarray, params)
    _, out = decoder.forward(
        config, params, None, tokens, jnp.arange(5), dense_attention, dtype="float32", backend="reference"
    )
    return np.asarray(out)


@pytest.mark.parametrize(
    ("heads", "shards"),
    [((4, 2), 2), ((4, 2), 4), ((9, 3), 2), ((9, 3), 4), ((8, 1), 4), ((8, 1), 8), ((6, 6), 4), ((6, 6), 5)],
)
def test_same_output(heads: tuple[int, int], shards: int) -> None:
    config = model(*heads)
    params = random_params(config, scale=0.1)
    target = split_heads(config, shards)
    assert target.num_kv_heads % shards == 0
    assert target.intermediate_size % shards == 0
    expected = hidden(config, params)
    np.testing.assert_allclose(hidden(target, split_params(config, target, params)), expected, atol=1e-5)


def test_fewer_kv_heads_than_devices_are_copied_in_whole_groups() -> None:
    target = split_heads(model(8, 2), 4)
    assert (target.num_kv_heads, target.group_size) == (4, 2)


def test_heads_that_do_not_divide_are_padded() -> None:
    target = split_heads(model(9, 3), 2)
    assert (target.num_kv_heads, target.group_size) == (4, 3)


def test_more_devices_than_query_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 8, but the model has 4 query heads"):
        split_heads(model(4, 2), 8)


def test_rotated_weights_that_padding_would_misalign_are_refused() -> None:
    wide = dataclasses.replace(TINY, intermediate_size=127)
    with pytest.raises(ConfigError, match=r"blocks of 64: the hidden size of the MLP, 127, .* padded to 128"):
        check_rotated(wide, split_heads(wide, 2))
    check_rotated(TINY, split_heads(TINY, 4))
