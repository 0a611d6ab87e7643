"""The tensor rope_freqs.weight, in which GGUF files bake Llama 3.1's frequency scaling, back to its parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxkv.core.errors import ModelLoadError
from jaxkv.models.config import RopeConfig

# What every released model of this kind was trained with; the file does not say.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_MAX_POSITION = 1.0, 4.0, 8192
_TOLERANCE = 1e-4


def llama3_from_factors(factors: NDArray[Any], theta: float, original: int | None, where: str) -> RopeConfig:
    """factors: float [D/2], by which each inverse frequency is divided; original: context of pre-training, if known.

    Raises ModelLoadError when the tensor is anything but Llama 3.1's scaling, or none at all.
    """
    factors = factors.astype(np.float64)
    if factors.ndim != 1 or not np.isfinite(factors).all() or factors.min() <= 0:
        raise ModelLoadError(
            f"{where}: tensor rope_freqs.weight must hold positive finite numbers, one per pair of dimensions"
        )
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=float(factors.max()),
        low_freq_factor=_LOW_FREQ_FACTOR,
        high_freq_factor=_HIGH_FREQ_FACTOR,
        original_max_position=original or _ORIGINAL_MAX_POSITION,
    )
    if np.all(factors == 1.0):
        return RopeConfig(theta=theta)
    if not np.allclose(factors, _expected(rope, len(factors)), rtol=_TOLERANCE):
        raise ModelLoadError(
            f"{where}: rope_freqs.weight (largest {rope.factor:g}) is not Llama 3.1's scaling with low_freq_factor "
            f"{_LOW_FREQ_FACTOR:g}, high_freq_factor {_HIGH_FREQ_FACTOR:g}, context {rope.original_max_position}"
        )
    return rope


def _expected(rope: RopeConfig, pairs: int) -> NDArray[np.float64]:
    assert rope.original_max_position is not None
    wavelength = 2 * math.pi * rope.theta ** (np.arange(pairs) / pairs)
    band = rope.high_freq_factor - rope.low_freq_factor
    smooth = np.clip((rope.original_max_position / wavelength - rope.low_freq_factor) / band, 0.0, 1.0)
    expected: NDArray[np.float64] = 1.0 / ((1.0 - smooth) / rope.factor + smooth)
    return expected
