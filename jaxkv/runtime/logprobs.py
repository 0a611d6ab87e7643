"""Raw log-probabilities, before temperature, penalties and bias: of the sampled tokens and of the prompt."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxkv.core.sampling_params import MAX_LOGPROBS

ROWS_AT_ONCE = 32
"""Rows of the prompt whose logits exist at the same time."""


@struct.dataclass
class Logprobs:
    """Over R rows: of the chosen token, its rank (1 = best), and the MAX_LOGPROBS best."""

    chosen: jax.Array  # [R] float32
    rank: jax.Array  # [R] int32
    top_ids: jax.Array  # [R, MAX_LOGPROBS] int32
    top: jax.Array  # [R, MAX_LOGPROBS] float32


def no_logprobs(rows: int) -> Logprobs:
    return Logprobs(
        chosen=jnp.zeros(rows, jnp.float32),
        rank=jnp.zeros(rows, jnp.int32),
        top_ids=jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        top=jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
    )


def logprobs_of(logits: Float[Array, "R V"], chosen: Int[Array, " R"]) -> Logprobs:
    """Log-softmax values of `chosen` and of the best tokens of each row."""
    k = min(MAX_LOGPROBS, logits.shape[1])
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    at_chosen = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
    top, top_ids = jax.lax.top_k(logits, k)
    pad = ((0, 0), (0, MAX_LOGPROBS - k))
    return Logprobs(
        chosen=(at_chosen - normalizer)[:, 0],
        rank=1 + jnp.sum(logits > at_chosen, axis=-1, dtype=jnp.int32),
        top_ids=jnp.pad(top_ids.astype(jnp.int32), pad),
        top=jnp.pad(top - normalizer, pad, constant_values=-jnp.inf),
    )


def sampled_logprobs(flag: Bool[Array, ""], logits: Float[Array, "S V"], tokens: Int[Array, " S"]) -> Logprobs:
    """Of the tokens just sampled; zeros when nobody asks."""
    out: Logprobs = jax.lax.cond(flag, lambda: logprobs_of(logits, tokens), lambda: no_logprobs(tokens.shape[0]))
    return out


def prompt_logprobs(
    flag: Bool[Array, ""],
    hidden: Float[Array, "T E"],
    targets: Int[Array, " T"],
    to_logits: Callable[[Array], Array],
) -> Logprobs:
    """Of the token that follows each row, a few rows at a time; zeros when nobody asks.

    targets: the following prompt token; entries of rows that nobody reads may be any id within the vocabulary.
    """
    T = hidden.shape[0]
    rows = min(ROWS_AT_ONCE, T)

    def score() -> Logprobs:
        blocks = (hidden.reshape(T // rows, rows, -1), targets.reshape(T // rows, rows))
        out = jax.lax.map(lambda block: logprobs_of(to_logits(block[0]), block[1]), blocks)
        return jax.tree.map(lambda x: x.reshape(T, *x.shape[2:]), out)  # type: ignore[no-any-return]

    result: Logprobs = jax.lax.cond(flag, score, lambda: no_logprobs(T))
    return result
