"""The decoder's arithmetic: a token's numbers do not depend on how many rows a step has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.tiny_engine import TINY, quantized, random_params

from jaxkv.models import decoder


@pytest.mark.parametrize("width", [16, 64, 576])
def test_norms_of_rows_do_not_see_each_other(width: int) -> None:
    x = jax.random.normal(jax.random.key(0), (512, width))
    norm = jax.jit(lambda x: decoder.rms_norm(x, jnp.ones(width), 1e-5))
    whole = np.asarray(norm(x))
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(whole, wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5), rtol=1e-5)
    for rows in (8, 16, 32, 64, 96, 128):
        np.testing.assert_array_equal(np.asarray(norm(x[:rows])), whole[:rows])


@pytest.mark.parametrize("int8", [False, True])
def test_rows_of_a_forward_pass_do_not_see_each_other(int8: bool) -> None:
    params: Any = random_params(TINY)
    params = jax.tree.map(jnp.asarray, quantized(TINY, params) if int8 else params)
    tokens, positions = jax.random.randint(jax.random.key(1), (64,), 0, 250), jnp.arange(64)

    def attend(cache: Any, _: Any, q: Any, k: Any, v: Any) -> Any:
        return cache, q * 1.5 + k[:, :, None] - v[:, :, None]

    forward = jax.jit(
        lambda t, p: decoder.forward(TINY, params, (), t, p, attend, dtype="float32", backend="reference")[1]
    )
    whole = np.asarray(forward(tokens, positions))
    for rows in (8, 16, 32):
        np.testing.assert_array_equal(np.asarray(forward(tokens[:rows], positions[:rows])), whole[:rows])
