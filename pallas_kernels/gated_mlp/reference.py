"""The gated MLP in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.matmul import matmul
from pallas_kernels.quantized_matmul.weights import Plain, layer_of


def mlp(x: Float[Array, "T E"], gate_up: Plain, down: Plain, layer: Int[Array, ""]) -> Float[Array, "T E"]:
    """Contract: `pallas_kernels.gated_mlp.api`."""
    # A layer's two matrices are multiplied apart: taken as one, a sharding over F would not be one of its rows.
    both = layer_of(gate_up, layer)
    gate = matmul(x, jax.tree.map(lambda array: array[0], both), backend="reference")
    up = matmul(x, jax.tree.map(lambda array: array[1], both), backend="reference")
    # In float32, rounded once: each operation rounded to bfloat16 by itself is slow on CPU, and no more exact anywhere.
    activated = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return matmul(activated.astype(x.dtype), down, layer, backend="reference")
