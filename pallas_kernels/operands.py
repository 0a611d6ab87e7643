"""What the matmuls ask of their operands: shapes that fit each other, and a layer of a stack that the backend can read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.quantized_matmul.weights import Plain


def check_operands(
    x: Float[Array, "T in"], weight: Plain, layer: Int[Array, ""] | None, *, packed: bool, backend: str
) -> None:
    """Raises ValueError for shapes that do not fit each other, and for a packed weight that the backend cannot read."""
    if len(weight.shape) != (2 if layer is None else 3) or x.ndim != 2 or x.shape[1] != weight.shape[-1]:
        raise ValueError(
            f"activations of shape {x.shape} do not fit a weight of shape {weight.shape}: they must be [T, in] and [out, in], "
            f"or [L, out, in] with `layer` ({'not given' if layer is None else 'given'} here)"
        )
    if packed and backend != "cpu_native":
        raise ValueError(f"a packed weight can be read by matmul backend 'cpu_native' only, not by {backend!r}")


def in_stack[W: Plain](
    x: Float[Array, "T in"], weight: W, layer: Int[Array, ""] | None, rows: Int[Array, ""] | None
) -> tuple[W, Int[Array, ""], Int[Array, ""]]:
    """(stack [L, out, in], layer, rows) as kernels take them: a weight alone is a stack of one, and all rows are T."""
    if layer is None:
        weight, layer = jax.tree.map(lambda array: array[None], weight), jnp.int32(0)
    return weight, jnp.asarray(layer, jnp.int32), jnp.asarray(x.shape[0] if rows is None else rows, jnp.int32)
