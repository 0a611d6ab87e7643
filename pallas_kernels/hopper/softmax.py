"""Online softmax in base 2 (Milakov and Gimelshein 2018): logits, and one tile of them after the other."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.scoring import LOG2E

NO_LOGIT = -1e30
"""The running maximum before any key: finite, so that masked keys (-inf) against it give a weight of 0, not NaN."""


def logits(
    dots: Array, scale: float, soft_cap: float | None, key_scale: Array | None = None
) -> tuple[Array, Array | float]:
    """(x, factor) such that x * factor are the logits in base 2: q.k scaled, soft-capped, times log2(e); factor > 0 is a scalar.

    key_scale: None, a scalar, or an array of dots' shape. The factor is kept apart because it then costs nothing:
    2 ** (x * factor - top) is one fused multiply-add and one exponential.
    """
    if soft_cap is not None:
        double = 2.0 * LOG2E * scale / soft_cap
        x = dots * double if key_scale is None else dots * (key_scale * double)
        # tanh(x) = 1 - 2 / (1 + e^2x): exact to float32, where the hardware's tanh keeps only 11 bits.
        return 1.0 - 2.0 / (1.0 + jnp.exp2(x)), soft_cap * LOG2E
    scale *= LOG2E
    if key_scale is None:
        return dots, scale
    return (dots, key_scale * scale) if key_scale.ndim == 0 else (dots * key_scale, scale)


def fold(scores: Array, factor: Array | float, top: Array, total: Array) -> tuple[Array, Array, Array, Array]:
    """(top, total, weights, factor by which earlier results shrink) with one more tile of scores [rows, keys]."""
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    return new_top, total * shrink + weights.sum(axis=1), weights, shrink


def choose(condition: Array, yes: Array | float, no: Array) -> Array:
    """`jnp.where` of a scalar condition and arrays, which the kernels' lowering wants broadcast."""
    return jnp.where(lax.broadcast_in_dim(condition, no.shape, []), yes, no)
