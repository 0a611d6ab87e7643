"""Rotation of a matmul's inputs, so that outliers of activations spread over a block before they are quantized.

Each 64 inputs of activations and weights are multiplied by an orthogonal Hadamard matrix H: x w = (x H)(w H). The products stay as
they are, while one large input becomes 64 of an eighth of its size, so a row's scale fits the others too (QuaRot,
Ashkboos et al. 2024). Inputs beyond the last whole block stay as they are.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

BLOCK = 64


def _hadamard() -> np.ndarray[Any, np.dtype[np.float32]]:
    """Sylvester's matrix, of +1/8 and -1/8 (exact): symmetric, and its own inverse."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(BLOCK**0.5)


HADAMARD = _hadamard()


def rotate(x: Float[Array, "T in"]) -> Float[Array, "T in"]:
    """x H of activations, or of a rotated weight's rows to turn them back; in float32."""
    T, width = x.shape
    whole = width // BLOCK * BLOCK
    # +1/8 and -1/8 are exact in every float dtype, so bfloat16 inputs need no wider products.
    turned = jnp.dot(
        x[:, :whole].reshape(-1, BLOCK),
        HADAMARD.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ).reshape(T, whole)
    return turned if whole == width else jnp.concatenate([turned, x[:, whole:].astype(jnp.float32)], axis=1)


def rotate_weight(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """w H of host rows [out, in], in float32: what rotated activations are to be multiplied by."""
    whole = rows.shape[1] // BLOCK * BLOCK
    turned = np.array(rows, np.float32)
    turned[:, :whole] = (turned[:, :whole].reshape(-1, BLOCK) @ HADAMARD).reshape(len(rows), whole)
    return turned
