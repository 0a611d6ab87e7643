"""Arrays for the calls of `pallas_kernels.inspection.calls`, drawn on the device that is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import Backend
from pallas_kernels.inspection.calls import OPS, Call, Shape
from pallas_kernels.kv_layout import KVPages

REPEATS = 16
"""Calls in one program, so that the time of a call is not that of its dispatch."""


def arguments(op: str, shape: Shape, call: Call) -> tuple[Any, ...]:
    """Random arrays in the shapes of call.args; index arrays that name every page once."""
    keys = iter(jax.random.split(jax.random.key(0), 32))

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if leaf.dtype in (jnp.int8, jnp.uint8):
            return jax.random.randint(next(keys), leaf.shape, 0, 127, jnp.int32).astype(leaf.dtype)
        return jax.jit(
            lambda key: jax.random.normal(key, leaf.shape, jnp.bfloat16).astype(leaf.dtype)
        )(next(keys))  # fmt: skip

    drawn = list(
        jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if leaf.dtype == jnp.int32 else draw(leaf), call.args
        )
    )
    for i, argument in enumerate(drawn):
        if isinstance(argument, KVPages) and argument.scales is not None:
            drawn[i] = KVPages(argument.pages, jnp.full(argument.scales.shape, 0.02, jnp.float32))
    rng = np.random.default_rng(0)
    if op == "ragged_paged_attention":
        S, width = call.args[3].shape
        drawn[3] = jnp.asarray(rng.permutation(S * width).reshape(S, width), jnp.int32)
        drawn[4] = jnp.arange(S + 1, dtype=jnp.int32) * shape.queries
        drawn[5] = jnp.full(S, shape.context, jnp.int32)
        drawn[6] = jnp.int32(S)
    if op == "kv_write":
        pages, T = rng.permutation(shape.seqs * 32 - 1), shape.tokens
        drawn[4] = jnp.asarray(np.resize(pages, T), jnp.int32)
        drawn[5] = jnp.asarray(np.arange(T) // len(pages), jnp.int32)
    if op == "page_copy":
        half = rng.permutation(shape.seqs * 32 - 1)[: 2 * shape.tokens].reshape(2, shape.tokens)
        drawn[1], drawn[2] = (jnp.asarray(ids, jnp.int32) for ids in half)
    return tuple(drawn)


def repeated(call: Call) -> Callable[..., Any]:
    """REPEATS calls one after the other: each takes what the one before gave, so that none can be left out."""

    def run(first: Any, *others: Any) -> Any:
        def body(carry: Any, _: None) -> tuple[Any, None]:
            out = call.function(carry, *others)
            if call.donate:
                return out, None
            return jax.tree.map(lambda a: a + (jnp.mean(out, dtype=jnp.float32) * 1e-6).astype(a.dtype), carry), None

        return jax.lax.scan(body, first, None, length=REPEATS)[0]

    return jax.jit(run, donate_argnums=call.donate)


def make(op: str, shape: Shape, backend: Backend) -> tuple[Call, tuple[Any, ...]]:
    call = OPS[op](shape, backend)
    return call, arguments(op, shape, call)
