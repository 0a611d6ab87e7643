"""What a query sees and how it scores it: the one rule that attention kernels cut their work by, and that tests count with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scores are `scale * q.k`, soft-capped; a query sees what `causal` and the window leave it. See the entry point."""

    scale: float
    causal: bool
    sliding_window: int | None = None
    logit_soft_cap: float | None = None

    def scores(self, dots: Float[Array, ...]) -> Float[Array, ...]:
        """Scores of raw products."""
        scores = dots * self.scale
        if self.logit_soft_cap is not None:
            scores = self.logit_soft_cap * jnp.tanh(scores / self.logit_soft_cap)
        return scores

    def visible(self, query_at: Int[Array, ...], key_at: Int[Array, ...]) -> Bool[Array, ...]:
        """Whether the query at one position sees the key at another."""
        seen = key_at <= query_at if self.causal else jnp.bool_(True)
        if self.sliding_window is not None:
            seen &= key_at > query_at - self.sliding_window
        return seen

    def first_visible(self, query_at: Any) -> Any:
        """The smallest position of a key that a query at query_at sees."""
        if self.sliding_window is None:
            return jnp.zeros_like(query_at)
        return jnp.maximum(query_at - self.sliding_window + 1, 0)

    def seen_by_any(self, first: Any, last: Any, q_len: Any, kv_len: Any) -> tuple[Any, Any]:
        """Keys [low, high) that queries first..last see between them, those beyond q_len left out; low >= high if none."""
        offset = kv_len - q_len
        high = kv_len
        if self.causal:
            high = jnp.minimum(last, q_len - 1) + offset + 1
        low = self.first_visible(first + offset)
        return low, jnp.where(first < q_len, high, 0)

    def seen_by_all(self, first: Any, last: Any, q_len: Any, kv_len: Any) -> tuple[Any, Any]:
        """Keys [low, high) that each of the queries first..last sees, those beyond q_len counted as real."""
        offset = kv_len - q_len
        high = jnp.minimum(first + offset + 1, kv_len) if self.causal else kv_len
        return self.first_visible(last + offset), high

    def blocks(self, first: Any, last: Any, q_len: Any, kv_len: Any, keys: int) -> tuple[Any, Any]:
        """(first, number) of the blocks of `keys` keys that hold what queries first..last see between them."""
        low, high = self.seen_by_any(first, last, q_len, kv_len)
        begin = low // keys
        return begin, jnp.where(high > low, (high + keys - 1) // keys - begin, 0)
