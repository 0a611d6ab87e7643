"""Rotation of a matmul's inputs, so that outliers of activations spread over a block before they are quantized.

Each 64 inputs of activations and weights are multiplied by a Hadamard matrix H, which is orthogonal up to a factor: x w = (x H)(w H)^T / 64.
The products stay as they are, while one large input becomes 64 of an eighth of its size, so a row's scale fits the others too
(QuaRot, Ashkboos et al. 2024). Inputs beyond the last whole block stay as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

BLOCK = 64


def _hadamard() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Sylvester's matrix of +1 and -1, symmetric, its own inverse up to 1 / BLOCK."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


HADAMARD = _hadamard()


def rotate(x: Float[Array, "T in"]) -> Float[Array, "T in"]:
    """x H, in float32."""
    T, width = x.shape
    whole = width // BLOCK * BLOCK
    wide = x.astype(jnp.float32)
    blocks = jnp.dot(wide[:, :whole].reshape(-1, BLOCK), HADAMARD, precision=jax.lax.Precision.HIGHEST)
    turned = blocks.reshape(T, whole)
    return turned if whole == width else jnp.concatenate([turned, wide[:, whole:]], axis=1)


def unrotate(x: Float[Array, "T in"]) -> Float[Array, "T in"]:
    """The inverse of what `rotate_weight` does, in float32."""
    return rotate(x)


def rotate_weight(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """w H / 64 of host rows [out, in], in float32: what `rotate`d activations are to be multiplied by."""
    whole = rows.shape[1] // BLOCK * BLOCK
    turned = np.array(rows, np.float32)
    turned[:, :whole] = (turned[:, :whole].reshape(-1, BLOCK) @ (HADAMARD / BLOCK)).reshape(len(rows), whole)
    return turned
