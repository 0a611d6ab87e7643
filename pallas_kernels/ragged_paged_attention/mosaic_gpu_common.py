"""What the Hopper decode and prefill kernels share: the static description of a call, page copies, scores and masks.

Vocabulary of both kernels: a *tile* is KEY_TILE keys of one sequence; a *page row* is one [page, D] block of the pool
(one page, K or V, one head), the unit that one TMA copy moves. The pool is viewed as [L * P * 2 * K, page, D], which
is a bitcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.memory import Ref
from pallas_kernels.hopper.softmax import logits

KEY_TILE = 64
"""Keys in one tile of the decode kernel, and the unit in which tile sizes of the prefill kernel come."""

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
KV_DTYPES = ("bfloat16", "float16", "int8", *FP8_DTYPES)


@dataclass(frozen=True, slots=True)
class CallSpec:
    """Everything static about one attention call.

    group: query heads per KV head. scales: how a quantized pool is scaled, "token" is one float32 per token and head,
    "static" one per layer and head. softmax_scale, sliding_window, soft_cap, has_sinks: see the entry point's contract.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    kv_dtype: str
    scales: Literal["none", "static", "token"]
    softmax_scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    @property
    def quantized(self) -> bool:
        return jnp.dtype(self.kv_dtype).itemsize == 1

    @property
    def compute_dtype(self) -> Any:
        """The 16-bit type of the matmuls that represents every stored value exactly; fp8 converts to float16 in hardware."""
        return jnp.float16 if self.kv_dtype == "float16" or self.kv_dtype in FP8_DTYPES else jnp.bfloat16

    def page_copies(self, keys: int) -> int:
        """TMA copies that fill a tile of `keys` keys of one of K and V."""
        return max(1, keys // self.page_size)

    @property
    def value_gain(self) -> float:
        """Power of two that keeps probability * value scale in float16's normal range; divided out at the end.

        A dynamic scale is amax / (largest quantized value), so the product with the gain is of the size of amax itself.
        """
        if self.scales != "token":
            return 1.0
        return {"float8_e4m3fn": 2.0**8, "float8_e5m2": 2.0**15}.get(self.kv_dtype, 1.0)


def pool_rows(pages: jax.Array) -> jax.Array:
    """[L, P, 2, K, page, D] as [L * P * 2 * K, page, D]: no copy."""
    return pages.reshape(-1, *pages.shape[-2:])


def scale_rows(scales: jax.Array) -> jax.Array:
    """[L, P, 2, K, page] as [L * P * 2 * K, page], or [L, 2, K] as [L * 2 * K]: no copy."""
    return scales.reshape(-1, scales.shape[-1]) if scales.ndim == 5 else scales.reshape(-1)


def copy_tile(
    spec: CallSpec,
    *,
    pool: Ref,
    scales: Ref | None,
    first_row: Callable[[jax.Array], jax.Array],
    page_ids: Ref,
    key0: jax.Array,
    kv_len: jax.Array,
    tile: Ref,
    tile_scales: Ref | None,
    barrier: Ref,
    rows: int | None = None,
    first_key: jax.Array | None = None,
) -> None:
    """Starts the copies of one sequence's keys (or values) from key0 on that fill `tile` [keys, D].

    first_row(page id) is the page's row in the pool. rows: of one copy, a divisor of the page and of the tile; the smaller
    of the two by default. What lies wholly before first_key, or at or beyond kv_len, is not read: its share of the
    barrier's arrivals is given at once and its part of `tile` keeps what it held. key0 is a multiple of the tile's
    keys and below kv_len. The barrier takes keys / rows arrivals, twice as many with token scales.
    """
    keys = tile.shape[0]
    step = rows or min(spec.page_size, keys)
    for i in range(keys // step):
        token0 = key0 + i * step

        def copy(token0: jax.Array = token0, i: int = i) -> None:
            row = first_row(page_ids[lax.div(token0, jnp.int32(spec.page_size))])
            within: Any = slice(None)
            if spec.page_size > step:
                within = pl.ds(pl.multiple_of(lax.rem(token0, jnp.int32(spec.page_size)), step), step)
            target = pl.ds(i * step, step)
            plgpu.copy_gmem_to_smem(pool.at[row, within], tile.at[target], barrier)
            if tile_scales is not None and scales is not None:
                plgpu.copy_gmem_to_smem(
                    scales.at[row, within],
                    tile_scales.at[target],
                    barrier,
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

        def skip() -> None:
            plgpu.barrier_arrive(barrier)
            if tile_scales is not None:
                plgpu.barrier_arrive(barrier)

        if first_key is None and i == 0:
            copy()
            continue
        needed = token0 < kv_len
        if first_key is not None:
            needed &= token0 + step > first_key
        pl.when(needed)(copy)
        pl.when(jnp.logical_not(needed))(skip)


def scaled_dots(spec: CallSpec, dots: jax.Array, key_scale: jax.Array | None) -> tuple[jax.Array, jax.Array | float]:
    """(x, factor) such that x * factor are the call's logits in base 2."""
    return logits(dots, spec.softmax_scale, spec.soft_cap, key_scale)


def first_visible_key(spec: CallSpec, position: jax.Array) -> jax.Array:
    """The smallest key position that a query at `position` sees."""
    if spec.sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - (spec.sliding_window - 1), 0)
