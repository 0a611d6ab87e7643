"""The decoder, one for all families: pure functions over the parameter tree. It knows the KV cache only through `attend`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.models.config import ModelConfig
from jaxkv.models.params import Params
from jaxkv.models.rope import rotate
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.weights import QuantizedWeight, lookup

Weight = jax.Array | QuantizedWeight

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
) -> tuple[Cache, Float[Array, "T E"]]:
    """All layers and the final norm. Returns the cache and the hidden state of every token, in `dtype`."""
    hidden = _embed(params["embed"], tokens, dtype)

    def layer(carry: tuple[Cache, Array], inputs: tuple[Array, Params]) -> tuple[tuple[Cache, Array], None]:
        cache, hidden = carry
        index, weights = inputs
        weights = _with_vectors_apart(weights)
        cache, hidden = _attention(config, weights, cache, index, hidden, positions, attend)
        return (cache, _mlp(config, weights, hidden)), None

    layers = (jnp.arange(config.num_layers), params["layers"])
    (cache, hidden), _ = jax.lax.scan(layer, (cache, hidden), layers)
    return cache, rms_norm(hidden, params["final_norm"], config.rms_norm_eps)


def _with_vectors_apart(weights: Params) -> Params:
    """One layer's weights, its vectors (norms, scales) cut from their stacks before anything else.

    XLA would cut them in the middle of elementwise loops, which its CPU backend then does not vectorize: they ran seven times longer.
    """

    def apart(weight: Weight) -> Weight:
        if isinstance(weight, QuantizedWeight):
            return dataclasses.replace(weight, scales=jax.lax.optimization_barrier(weight.scales))
        return jax.lax.optimization_barrier(weight) if weight.ndim == 1 else weight

    return {name: apart(weight) for name, weight in weights.items()}


def logits(params: Params, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
    """float32 logits of some rows' hidden states."""
    table = params["lm_head"] if "lm_head" in params else params["embed"]
    return _matmul(hidden, table, out_dtype="float32")


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
    weights: Params,
    cache: Cache,
    layer: Int[Array, ""],
    hidden: Float[Array, "T E"],
    positions: Int[Array, " T"],
    attend: Attend[Cache],
) -> tuple[Cache, Float[Array, "T E"]]:
    T, (K, G, D) = hidden.shape[0], (config.num_kv_heads, config.group_size, config.head_dim)
    normed = rms_norm(hidden, weights["attn_norm"], config.rms_norm_eps)
    qkv = _matmul(normed, weights["qkv"]).reshape(T, K, G + 2, D)
    qk = rotate(qkv[:, :, : G + 1], positions, config.rope)
    cache, mixed = attend(cache, layer, qk[:, :, :G], qk[:, :, G], qkv[:, :, G + 1])
    return cache, hidden + _matmul(mixed.reshape(T, K * G * D), weights["o"])


def _mlp(config: ModelConfig, weights: Params, hidden: Float[Array, "T E"]) -> Float[Array, "T E"]:
    normed = rms_norm(hidden, weights["mlp_norm"], config.rms_norm_eps)
    gate = _matmul(normed, jax.tree.map(lambda both: both[0], weights["gate_up"]))
    up = _matmul(normed, jax.tree.map(lambda both: both[1], weights["gate_up"]))
    # In float32, rounded once: each operation rounded to bfloat16 by itself is slow on CPU, and no more exact anywhere.
    activated = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return hidden + _matmul(activated.astype(hidden.dtype), weights["down"])


def _embed(table: Weight, tokens: Int[Array, " T"], dtype: str) -> Float[Array, "T E"]:
    if isinstance(table, QuantizedWeight):
        return lookup(table, tokens, dtype)
    return table.at[tokens].get(mode="promise_in_bounds").astype(dtype)


def _matmul(x: Float[Array, "T in"], weight: Weight, out_dtype: str | None = None) -> Float[Array, "T out"]:
    """x by a weight whose last dimensions, taken together, are x's width; the others become one. In x's dtype or out_dtype.

    Two-dimensional on purpose: XLA's CPU backend multiplies by weights of more dimensions several times slower.
    """
    if isinstance(weight, QuantizedWeight):
        values, scales = weight.values.reshape(-1, x.shape[1]), weight.scales.reshape(-1)
        flat = dataclasses.replace(weight, values=values, scales=scales)
        return quantized_matmul(x, flat, out_dtype=out_dtype)
    flat_weight = weight.reshape(-1, x.shape[1])
    product = jnp.einsum("ti,oi->to", x, flat_weight, preferred_element_type=jnp.float32)
    return product.astype(out_dtype or x.dtype)
