"""Matmul with float weights in plain XLA."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def matmul(x: Float[Array, "T in"], weight: Float[Array, "out in"], out_dtype: jnp.dtype) -> Float[Array, "T out"]:
    """Contract: `pallas_kernels.dense_matmul.api`; the weight is one layer's."""
    return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.float32).astype(out_dtype)
