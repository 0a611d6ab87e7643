"""What the device check runs: the cases of parity and of times, and arrays for the timed calls, drawn on the device that is here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import Backend
from pallas_kernels.inspection.calls import LAYERS, OPS, Call, Shape
from pallas_kernels.kv_layout import KVPages
from pallas_kernels.quantized_matmul.weights import KINDS, QuantizedWeight

REPEATS = 16
"""Calls in one program, so that the time of a call is not that of its dispatch."""
LAYER = LAYERS - 1
"""Not the first one, where a kernel that forgets its layer would be right."""
SCALE_EXPONENTS = (-8, -3)
"""Scales are 2.0 to the power of integers from here up to, not including, here: mixed up, they change results. Times 8-bit numbers of
a size around SPREAD they give keys between 0.25 and 4.5, so that a softmax sees many keys."""
SPREAD = 64.0

POOLS = ("bfloat16", "int8", "float8_e4m3fn")
SMALL = Shape(seqs=5, context=300, queries=3, num_heads=8, num_kv_heads=2, tokens=24, outputs=512, inputs=512)
LLAMA = Shape()
MIXED = ((1, 300), (70, 70), (1, 1), (5, 257), (1, 128), (130, 200), (1, 65))
"""(new tokens, context) of each sequence: decodes and prefills, of one token to more than a tile, around the ends of pages."""
DECODES = ((1, 300), (1, 1), (1, 129), (1, 64))
PROMPTS = ((70, 70), (1, 300), (130, 257), (70, 40))
"""Queries and keys of dense attention; in the last, queries that see no key."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. lens and what follows are of attention in parity cases; timed calls have the lengths of their shape."""

    op: str
    name: str
    shape: Shape
    lens: tuple[tuple[int, int], ...] = ()
    sliding_window: int | None = None
    logit_soft_cap: float | None = None
    sinks: bool = False


def is_read_by(backend: Backend, case: Case) -> bool:
    """Whether the backend has pools of the case's dtype: the native CPU kernels have none of FP8. Whatever else it refuses is a failure."""
    return backend != "cpu_native" or not case.shape.dtype.startswith("float8")


def _in_turn(cases: list[Case]) -> list[Case]:
    """The first of each op, the second of each, and so on: a budget that ends early leaves no op out."""
    ops = [case.op for case in cases]
    turns = [ops[:i].count(op) for i, op in enumerate(ops)]
    return [cases[i] for i in sorted(range(len(cases)), key=turns.__getitem__)]


def parity_cases() -> list[Case]:
    """Each op as most models have it, then the rest of each in turn."""
    changed = functools.partial(dataclasses.replace, SMALL)
    paged = "ragged_paged_attention"
    return _in_turn([
        *(Case(paged, f"{dtype} D{dim}", changed(dtype=dtype, head_dim=dim), MIXED) for dim in (128, 64, 256) for dtype in POOLS),
        Case(paged, "decodes", SMALL, DECODES),
        Case(paged, "window", changed(num_heads=2), MIXED, sliding_window=40),
        Case(paged, "cap, int8 D64", changed(dtype="int8", head_dim=64), MIXED, logit_soft_cap=2.0),
        Case(paged, "sinks, float8 D256", changed(dtype="float8_e4m3fn", head_dim=256), MIXED, sinks=True),
        Case(paged, "window, cap, sinks", changed(num_heads=16), MIXED, 40, 2.0, True),
        *(Case("kv_write", dtype, changed(dtype=dtype)) for dtype in POOLS),
        *(Case("page_copy", dtype, changed(dtype=dtype)) for dtype in POOLS),
        *(Case("flash_attention", f"D{dim}", changed(head_dim=dim), PROMPTS) for dim in (128, 64, 256)),
        Case("flash_attention", "window, cap, sinks", SMALL, PROMPTS, 40, 2.0, True),
        *(Case("quantized_matmul", kind, changed(kind=kind)) for kind in KINDS),
    ])  # fmt: skip


def timed_cases(shape: Shape) -> list[Case]:
    """Calls at a shape, the ops in turn."""
    changed = functools.partial(dataclasses.replace, shape)
    few, paged = max(shape.seqs // 8, 1), "ragged_paged_attention"
    return _in_turn([
        *(Case(paged, f"decode, {dtype}", changed(dtype=dtype, queries=1)) for dtype in POOLS),
        *(Case(paged, f"prefill, {dtype}", changed(dtype=dtype, seqs=few, queries=shape.context)) for dtype in POOLS),
        Case("flash_attention", "causal", changed(seqs=few, queries=shape.context)),
        *(Case("quantized_matmul", f"{kind}, {tokens} rows", changed(kind=kind, tokens=tokens))
          for kind in KINDS for tokens in (shape.tokens, shape.tokens * 32)),
        *(Case("kv_write", dtype, changed(dtype=dtype)) for dtype in POOLS),
        *(Case("page_copy", dtype, changed(dtype=dtype)) for dtype in POOLS),
    ])  # fmt: skip


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, dims: tuple[int, ...], dtype: Any) -> jax.Array:
    """Numbers of all signs and sizes that `dtype` holds."""
    if dtype == jnp.uint8:
        return jax.random.bits(key, dims, jnp.uint8)
    if dtype == jnp.int8:
        return jax.random.randint(key, dims, -127, 128, jnp.int32).astype(jnp.int8)
    numbers = jax.random.normal(key, dims, jnp.bfloat16)
    return (jnp.clip(numbers * SPREAD, -448, 448) if jnp.dtype(dtype).itemsize == 1 else numbers).astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def _draw_scales(key: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return 2.0 ** jax.random.randint(key, dims, *SCALE_EXPONENTS).astype(jnp.float32)


def arguments(op: str, shape: Shape, call: Call) -> tuple[Any, ...]:
    """Random arrays in the shapes of call.args; index arrays that name every page once."""
    keys = iter(jax.random.split(jax.random.key(0), 32))

    def drawn_as(argument: Any) -> Any:
        if isinstance(argument, KVPages | QuantizedWeight):
            argument = dataclasses.replace(argument, scales=cast(Any, None))
        return jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype) if leaf.dtype == jnp.int32
            else _draw(next(keys), leaf.shape, leaf.dtype), argument,
        )  # fmt: skip

    drawn = [drawn_as(argument) for argument in call.args]
    for i, wanted in enumerate(call.args):
        if isinstance(wanted, KVPages | QuantizedWeight) and wanted.scales is not None:
            drawn[i] = dataclasses.replace(drawn[i], scales=_draw_scales(next(keys), wanted.scales.shape))
        if isinstance(wanted, QuantizedWeight) and wanted.zero_points is not None:
            drawn[i] = dataclasses.replace(drawn[i], zero_points=drawn[i].zero_points % 16)
    rng = np.random.default_rng(0)
    if op in ("ragged_paged_attention", "quantized_matmul"):
        drawn[2] = jnp.int32(LAYER)
    if op == "ragged_paged_attention":
        S, width = call.args[3].shape
        drawn[3] = jnp.asarray(rng.permutation(S * width).reshape(S, width), jnp.int32)
        drawn[4] = jnp.arange(S + 1, dtype=jnp.int32) * shape.queries
        drawn[5] = jnp.full(S, shape.context, jnp.int32)
        drawn[6] = jnp.int32(S)
    if op == "kv_write":
        pages, T = rng.permutation(shape.seqs * 32 - 1), shape.tokens
        drawn[1] = jnp.int32(LAYER)
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
