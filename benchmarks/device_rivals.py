"""What else is installed on a device and does the same work: XLA, cuDNN through JAX, JAX's own Pallas kernels, PyTorch.

Each rival is a function of a shape that gives a function of no arguments, which runs the work REPEATS times and waits for it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks.device_cases import REPEATS
from pallas_kernels.inspection.calls import Shape

Timed = Callable[[], None]


def of_interest(shape: Shape) -> Shape:
    """What rivals know of a shape: all compute in bfloat16, whatever the pool or the weight holds, so one time serves all."""
    plain = Shape()
    return dataclasses.replace(
        shape, dtype=plain.dtype, kind=plain.kind, page=plain.page, static_scales=plain.static_scales
    )


def _normal(seed: int, *dims: int) -> jax.Array:
    drawn: jax.Array = jax.jit(lambda: jax.random.normal(jax.random.key(seed), dims, jnp.bfloat16))()
    return drawn


def _chained(function: Callable[..., jax.Array], first: jax.Array, *others: jax.Array) -> Timed:
    def run(first: jax.Array, *others: jax.Array) -> jax.Array:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            mean = jnp.mean(function(carry, *others), dtype=jnp.float32)
            return carry + (mean * 1e-6).astype(carry.dtype), None

        return jax.lax.scan(body, first, None, length=REPEATS)[0]

    compiled = jax.jit(run)
    return lambda: jax.block_until_ready(compiled(first, *others))


def _dense(shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array]:
    B, T, H, K, D = shape.seqs, shape.context, shape.num_heads, shape.num_kv_heads, shape.head_dim
    return _normal(0, B, shape.queries, H, D), _normal(1, B, T, K, D), _normal(2, B, T, K, D)


def jax_attention(implementation: Literal["cudnn", "xla"]) -> Callable[[Shape], Timed]:
    """`jax.nn.dot_product_attention` over dense keys and values: no pages to follow."""

    def rival(shape: Shape) -> Timed:
        causal = shape.queries > 1
        return _chained(
            lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation),
            *_dense(shape),
        )

    return rival


def jax_ragged_paged_attention(shape: Shape) -> Timed:
    """JAX's own TPU kernel, pages of 128 tokens."""
    module: Any = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention")
    S, T, page = shape.seqs, shape.seqs * shape.queries, 128
    width = shape.context // page
    pages = _normal(1, S * width, page, 2 * shape.num_kv_heads, shape.head_dim)
    tables = (
        jnp.full(S, shape.context, jnp.int32),
        jnp.arange(S * width, dtype=jnp.int32).reshape(S, width),
        jnp.arange(S + 1, dtype=jnp.int32) * shape.queries,
        jnp.array([S], jnp.int32),
    )
    scale = shape.head_dim**-0.5
    return _chained(
        lambda q, pages, *tables: module.ragged_paged_attention(q, pages, *tables, sm_scale=scale),
        _normal(0, T, shape.num_heads, shape.head_dim), pages, *tables,
    )  # fmt: skip


def torch_attention(shape: Shape) -> Timed:
    """PyTorch's scaled_dot_product_attention over dense keys and values."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise RuntimeError("this PyTorch has no CUDA")
    B, T, D = shape.seqs, shape.context, shape.head_dim
    new: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(B, shape.num_heads, shape.queries, D, **new)
    k, v = (torch.randn(B, shape.num_kv_heads, T, D, **new) for _ in range(2))

    def run() -> None:
        for _ in range(REPEATS):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.queries > 1, enable_gqa=True)
        torch.cuda.synchronize()

    return run


def xla_matmul(shape: Shape) -> Timed:
    """The same matmul with bfloat16 weights, by XLA."""
    weight = _normal(1, shape.outputs, shape.inputs)
    return _chained(lambda x, w: x @ w.T, _normal(0, shape.tokens, shape.inputs), weight)


ATTENTION: dict[str, dict[str, Callable[[Shape], Timed]]] = {
    "gpu": {
        "cuDNN (dense)": jax_attention("cudnn"),
        "XLA (dense)": jax_attention("xla"),
        "PyTorch SDPA (dense)": torch_attention,
    },
    "tpu": {"JAX ragged_paged_attention": jax_ragged_paged_attention, "XLA (dense)": jax_attention("xla")},
    "cpu": {"XLA (dense)": jax_attention("xla")},
}


def rivals(op: str, platform: str) -> dict[str, Callable[[Shape], Timed]]:
    """Names and makers of what may be compared with `op`; making or running one raises where it is not installed or refuses."""
    if op == "quantized_matmul":
        return {"XLA, bfloat16 weights": xla_matmul}
    if op == "ragged_paged_attention":
        return ATTENTION[platform]
    if op == "flash_attention":
        return {name: rival for name, rival in ATTENTION[platform].items() if "paged" not in name}
    return {}
