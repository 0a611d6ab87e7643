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
_BLOCK = 128
"""Tokens whose maximum stands for them in the search for the best."""


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
    normalizer = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    at_chosen = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
    top, top_ids = _best(logits)
    return Logprobs(
        chosen=(at_chosen - normalizer)[:, 0],
        rank=1 + jnp.sum(logits > at_chosen, axis=-1, dtype=jnp.int32),
        top_ids=top_ids,
        top=top - normalizer,
    )


def _best(logits: Float[Array, "R V"]) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """The MAX_LOGPROBS best of each row, best first, without sorting the row: they lie in the blocks with the best maxima."""
    R, V = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -V % _BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(R, -1, _BLOCK)
    maxima = jnp.max(blocks, axis=-1)
    _, chosen = jax.lax.top_k(maxima, min(MAX_LOGPROBS, maxima.shape[1]))
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(R, -1)
    ids = (chosen[:, :, None] * _BLOCK + jnp.arange(_BLOCK)[None, None, :]).reshape(R, -1)
    top, at = jax.lax.top_k(candidates, MAX_LOGPROBS)
    return top, jnp.take_along_axis(ids, at, axis=1).astype(jnp.int32)


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
