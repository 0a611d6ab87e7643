"""Rotary position embedding: frequencies with their scalings, and the rotation."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, Int

from jaxkv.models.config import RopeConfig

Frequencies = npt.NDArray[np.floating[Any]]


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """The D/2 inverse frequencies (float32, radians per position) and the factor on cos and sin."""
    inv = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return (inv / rope.factor).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv).astype(np.float32), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inv, head_dim).astype(np.float32), yarn_attention_factor(rope)
    return inv.astype(np.float32), 1.0


def rotate(x: Float[Array, "T ... D"], positions: Int[Array, " T"], rope: RopeConfig) -> Float[Array, "T ... D"]:
    """Rotates the pairs (x[i], x[i + D/2]), Hugging Face's order. Computed in float32, returned in x's dtype."""
    inv, factor = frequencies(rope, x.shape[-1])
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv)[None, :]
    shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (x.shape[-1] // 2,)
    cos, sin = (jnp.cos(angles) * factor).reshape(shape), (jnp.sin(angles) * factor).reshape(shape)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def _llama3(rope: RopeConfig, inv: Frequencies) -> Frequencies:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, the band between blended."""
    assert rope.original_max_position is not None
    wavelength = 2 * math.pi / inv
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = np.clip(smooth, 0.0, 1.0)
    scaled: Frequencies = (1 - smooth) * inv / rope.factor + smooth * inv
    return scaled


def _yarn(rope: RopeConfig, inv: Frequencies, head_dim: int) -> Frequencies:
    """YaRN's "NTK-by-parts" blend between interpolated and original frequencies (Peng et al. 2023, section 3.2)."""
    original = rope.original_max_position
    assert original is not None

    def dim_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    blended: Frequencies = inv / rope.factor * ramp + inv * (1 - ramp)
    return blended


def yarn_attention_factor(rope: RopeConfig) -> float:
    """YaRN's temperature as a factor on cos and sin."""

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
