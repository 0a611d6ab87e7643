"""The decoder, one for all families: pure functions over the parameter tree. It knows the KV cache only through `attend`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig
from jaxkv.models.params import Params
from jaxkv.models.rope import rotate
from pallas_kernels.dense_matmul.api import Backend
from pallas_kernels.gated_mlp.api import gated_mlp
from pallas_kernels.matmul import Weight, matmul
from pallas_kernels.quantized_matmul.weights import Plain, QuantizedWeight, lookup

Cache = TypeVar("Cache")
Attend = Callable[
    [Cache, Int[Array, ""], Float[Array, "T K G D"], Float[Array, "T K D"], Float[Array, "T K D"]], tuple[Cache, Array]
]
"""(cache, layer, queries, keys, values) -> (cache with the new keys and values, attention output [T, K, G, D])."""


def forward[Cache](
    config: ModelConfig,
    params: Params,
    cache: Cache,
    tokens: Int[Array, " T"],
    positions: Int[Array, " T"],
    attend: Attend[Cache],
    *,
    dtype: str,
    backend: Backend,
    rows: Int[Array, ""] | None = None,
) -> tuple[Cache, Float[Array, "T E"]]:
    """All layers and the final norm. Returns the cache and the hidden state of every token, in `dtype`.

    backend: of the matmuls. They get all layers' weights and an index, so that a backend may read a layer where it lies.
    rows: how many of the first tokens are no padding; what comes out for the others means nothing.
    """
    hidden = _embed(params["embed"], tokens, dtype)
    multiply = partial(matmul, backend=backend, rows=rows)
    weights = params["layers"]

    def layer(carry: tuple[Cache, Array], inputs: tuple[Array, Params]) -> tuple[tuple[Cache, Array], None]:
        cache, hidden = carry
        index, norms = inputs
        # XLA would cut the vectors from their stacks in the middle of elementwise loops, which its CPU backend then does not
        # vectorize: they ran seven times longer.
        norms = jax.lax.optimization_barrier(norms)
        normed = rms_norm(hidden, norms["attn_norm"], config.rms_norm_eps)
        cache, mixed = _attention(config, weights, cache, index, normed, positions, attend, multiply)
        hidden = hidden + mixed
        normed = rms_norm(hidden, norms["mlp_norm"], config.rms_norm_eps)
        mlp = gated_mlp(normed, weights["gate_up"], weights["down"], index, backend=backend, rows=rows)
        return (cache, hidden + mlp), None

    norms = {name: weights[name] for name in ("attn_norm", "mlp_norm")}
    (cache, hidden), _ = jax.lax.scan(layer, (cache, hidden), (jnp.arange(config.num_layers), norms))
    return cache, rms_norm(hidden, params["final_norm"], config.rms_norm_eps)


def logits(
    params: Params, hidden: Float[Array, "R E"], *, backend: Backend, rows: Int[Array, ""] | None = None
) -> Float[Array, "R V"]:
    """float32 logits of some rows' hidden states. rows: see `forward`."""
    table = params["lm_head"] if "lm_head" in params else params["embed"]
    return matmul(hidden, table, backend=backend, rows=rows, out_dtype="float32")


def rms_norm(x: Float[Array, "T E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "T E"]:
    """Root-mean-square norm (Zhang and Sennrich 2019) in float32, returned in x's dtype."""
    wide = x.astype(jnp.float32)
    squares = jax.lax.platform_dependent(wide, cpu=_sum_of_squares_by_matmul, default=_sum_of_squares)
    scale = jax.lax.rsqrt(squares / x.shape[1] + eps)
    return (wide * scale * weight[None, :]).astype(x.dtype)


def _sum_of_squares(x: Float[Array, "T E"]) -> Float[Array, "T one"]:
    return jnp.sum(x * x, axis=-1, keepdims=True)


def _sum_of_squares_by_matmul(x: Float[Array, "T E"]) -> Float[Array, "T one"]:
    """XLA's CPU backend adds up a row in an order that depends on the number of rows, unless it is a matmul's: a token's numbers
    would depend on its neighbours. The barrier keeps it from seeing that the other matrix holds ones."""
    ones = jax.lax.optimization_barrier(jnp.ones((8, x.shape[1]), x.dtype))
    sums = jnp.einsum("te,oe->to", x * x, ones, precision=jax.lax.Precision.HIGHEST)
    return sums[:, :1]


def _attention[Cache](
    config: ModelConfig,
    weights: dict[str, Weight],
    cache: Cache,
    layer: Int[Array, ""],
    normed: Float[Array, "T E"],
    positions: Int[Array, " T"],
    attend: Attend[Cache],
    multiply: Callable[[Array, Weight, Array], Array],
) -> tuple[Cache, Float[Array, "T E"]]:
    T, (K, G, D) = normed.shape[0], (config.num_kv_heads, config.group_size, config.head_dim)
    qkv = multiply(normed, weights["qkv"], layer).reshape(T, K, G + 2, D)
    qk = rotate(qkv[:, :, : G + 1], positions, config.rope)
    cache, mixed = attend(cache, layer, qk[:, :, :G], qk[:, :, G], qkv[:, :, G + 1])
    return cache, multiply(mixed.reshape(T, K * G * D), weights["o"], layer)


def _embed(table: Plain, tokens: Int[Array, " T"], dtype: str) -> Float[Array, "T E"]:
    if isinstance(table, QuantizedWeight):
        return lookup(table, tokens, dtype)
    return table.at[tokens].get(mode="promise_in_bounds").astype(dtype)
