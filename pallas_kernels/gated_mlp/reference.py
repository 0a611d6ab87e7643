"""The gated MLP in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.matmul import Weight, matmul, reshape_weight


def mlp(x: Float[Array, "T E"], gate_up: Weight, down: Weight, layer: Int[Array, ""]) -> Float[Array, "T E"]:
    """Contract: `pallas_kernels.gated_mlp.api`."""
    L, _, F, E = gate_up.shape
    # A layer's two matrices are multiplied apart: taken as one, a sharding over F would not be one of its rows.
    in_turn = reshape_weight(gate_up, 2 * L, F, E)
    gate = matmul(x, in_turn, 2 * layer, backend="reference")
    up = matmul(x, in_turn, 2 * layer + 1, backend="reference")
    # In float32, rounded once: each operation rounded to bfloat16 by itself is slow on CPU, and no more exact anywhere.
    activated = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return matmul(activated.astype(x.dtype), down, layer, backend="reference")
