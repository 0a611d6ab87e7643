"""The running softmax of the TPU kernels, in units of log2: maximum, sum and weighted values of what was folded in so far."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import MASKED, Numbers, across, dot
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import LANES


class Softmax(NamedTuple):
    """References to VMEM, a float32 entry for each row of queries: top, total [n, rows, 128] and acc [n, rows, lanes].

    A total stays spread over the lanes; it and the weights carry 2^gain of `Numbers`.
    """

    top: Any
    total: Any
    acc: Any

    def weigh(
        self, i: Any, score: jax.Array, seen: jax.Array | None, scales: Any, numbers: Numbers
    ) -> tuple[jax.Array, jax.Array]:
        """Folds scores [rows, width] into entry i. Returns their weights times `scales()`, that of their values, and the factor by
        which what came before shrinks, [rows, 128].

        seen: where scores count; everywhere if None. scales: None for 1.
        """
        width = score.shape[1]
        score = score if seen is None else jnp.where(seen, score, MASKED)
        top = self.top[i]
        new_top = jnp.maximum(top, jnp.max(score, axis=1, keepdims=True))
        weights = jnp.exp2(score - across(new_top - float(numbers.gain), width))  # 0 where not seen: no top is that low
        shrink = jnp.exp2(top - new_top)
        chunks = [weights[:, at : at + LANES] for at in range(0, width, LANES)]
        self.top[i] = new_top
        self.total[i] = self.total[i] * shrink + functools.reduce(jnp.add, chunks)
        if scales is not None:
            weights = weights * scales()
            if seen is not None:  # what is not seen may have a scale that is NaN
                weights = jnp.where(seen, weights, 0.0)
        return weights, shrink

    def add(self, i: Any, weights: jax.Array, shrink: jax.Array, values: jax.Array, numbers: Numbers) -> None:
        """Adds weights [rows, width] times values [width, lanes] to entry i."""
        lanes = self.acc.shape[-1]
        self.acc[i] = self.acc[i] * across(shrink, lanes) + dot(weights, values, 0, numbers.precision)

    def result(self, i: Any, acc: jax.Array, factor: jax.Array, numbers: Numbers) -> jax.Array:
        """acc of entry i times `factor`, over the total."""
        total = jnp.sum(self.total[i], axis=1, keepdims=True) * 2.0**-numbers.gain
        return acc * factor / jnp.where(total == 0.0, 1.0, total)


def scratch(n: int, rows: int, lanes: int) -> Softmax:
    state = pltpu.VMEM((n, rows, LANES), jnp.float32)
    return Softmax(state, state, pltpu.VMEM((n, rows, lanes), jnp.float32))
