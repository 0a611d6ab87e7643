"""The calls that can be inspected: each op at a shape, as a function of abstract arrays, with the work that it cannot avoid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from pallas_kernels.backends import TRAITS, Backend, layout_for
from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.page_copy.api import copy_pages
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.weights import Kind, QuantizedWeight
from pallas_kernels.ragged_paged_attention.api import check_supported, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import make_plan

LAYERS = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call; an op reads those that it has. The defaults are Llama-3-8B's, 64 sequences with 2,048 tokens each.

    dtype: of the KV pool, or of dense arrays. page: tokens; None = the backend's own. queries: new tokens of each sequence.
    tokens, outputs, inputs, kind: of a quantized matmul; tokens of a KV write and pages of a page copy too.
    """

    dtype: str = "bfloat16"
    page: int | None = None
    static_scales: bool = False
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    seqs: int = 64
    context: int = 2048
    queries: int = 1
    tokens: int = 64
    outputs: int = 14_336
    inputs: int = 4096
    kind: Kind = "int8"


@dataclasses.dataclass(frozen=True)
class Call:
    """function(*args) is the op; args are ShapeDtypeStructs, those in `donate` are given away. flops, bytes: what the op needs at least.

    products: the dtype whose peak rate bounds the flops. block_tokens: that the TPU's decode kernel takes in one pass of its loop.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    flops: float
    bytes: float
    products: str = "bfloat16"
    donate: tuple[int, ...] = ()
    block_tokens: int | None = None


def _array(*dims: int, dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))


def layout_of(shape: Shape, backend: Backend) -> KVLayout:
    """The pool of a call, known to be one that the attention kernels read, as an engine would check. Raises ValueError."""
    layout = layout_for(
        backend,
        num_layers=LAYERS,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.page or TRAITS[backend].page_size,
        dtype=shape.dtype,
        static_scales=shape.static_scales,
    )
    check_supported(backend, layout, num_heads=shape.num_heads)
    return layout


def _pool(layout: KVLayout, num_pages: int) -> KVPages:
    scales = layout.scales_shape(num_pages)
    return KVPages(
        _array(*layout.pages_shape(num_pages), dtype=layout.pages_dtype),
        None if scales is None else _array(*scales, dtype=jnp.float32),
    )


def _visible(shape: Shape) -> float:
    """Pairs of a query and a key that it sees, of one sequence."""
    return shape.queries * (shape.context - (shape.queries - 1) / 2)


def attention(shape: Shape, backend: Backend) -> Call:
    """Ragged paged attention of `queries` new tokens of each sequence."""
    layout = layout_of(shape, backend)
    pages_per_seq = -(-shape.context // layout.page_size)
    S, T, H, D = shape.seqs, shape.seqs * shape.queries, shape.num_heads, shape.head_dim

    def call(q: jax.Array, kv: KVPages, *tables: jax.Array) -> jax.Array:
        return ragged_paged_attention(q, kv, *tables, layout=layout, scale=D**-0.5, backend=backend)

    block_tokens = None
    if backend == "mosaic_tpu":
        block_tokens = make_plan(layout, num_heads=H, num_tokens=T, pages_per_seq=pages_per_seq).block_tokens
    tables = (_array(), _array(S, pages_per_seq), _array(S + 1), _array(S), _array())
    return Call(
        call,
        (_array(T, H, D, dtype=jnp.bfloat16), _pool(layout, S * pages_per_seq), *tables),
        flops=4 * S * H * D * _visible(shape),
        bytes=S * shape.context * layout.bytes_per_token / LAYERS + 2 * T * H * D * 2,
        block_tokens=block_tokens,
    )


def dense_attention(shape: Shape, backend: Backend) -> Call:
    """Causal flash attention of whole prompts of `context` tokens."""
    B, T, H, K, D = shape.seqs, shape.context, shape.num_heads, shape.num_kv_heads, shape.head_dim

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, scale=D**-0.5, causal=True, backend=backend)

    q, kv = _array(B, T, H, D, dtype=shape.dtype), _array(B, T, K, D, dtype=shape.dtype)
    itemsize = jnp.dtype(shape.dtype).itemsize
    return Call(
        call,
        (q, kv, kv),
        flops=4 * B * H * D * T * (T + 1) / 2,
        bytes=2 * B * T * (H + K) * D * itemsize,
    )


def kv_write(shape: Shape, backend: Backend) -> Call:
    """A write of `tokens` new keys and values into one layer."""
    layout = layout_of(shape, backend)
    T, K, D = shape.tokens, shape.num_kv_heads, shape.head_dim

    def call(kv: KVPages, layer: jax.Array, *rows: jax.Array) -> KVPages:
        return write_kv(kv, layer, *rows, layout=layout, backend=backend)

    new = _array(T, K, D, dtype=jnp.bfloat16)
    return Call(
        call,
        (_pool(layout, shape.seqs * 32), _array(), new, new, _array(T), _array(T)),
        flops=0,
        bytes=T * (2 * K * D * 2 + layout.bytes_per_token / LAYERS),
        donate=(0,),
    )


def page_copy(shape: Shape, backend: Backend) -> Call:
    """A copy of `tokens` pages in all layers."""
    layout = layout_of(shape, backend)

    def call(kv: KVPages, sources: jax.Array, targets: jax.Array) -> KVPages:
        return copy_pages(kv, sources, targets, layout=layout, backend=backend)

    ids = _array(shape.tokens)
    return Call(
        call,
        (_pool(layout, shape.seqs * 32), ids, ids),
        flops=0,
        bytes=2 * shape.tokens * layout.bytes_per_page,
        donate=(0,),
    )


def matmul(shape: Shape, backend: Backend) -> Call:
    """One layer of a stack of quantized weights; on CPU by XLA where native code has no such kind."""
    chosen = "reference" if backend == "cpu_native" and shape.kind != "int8" else backend
    T, out, width, group = shape.tokens, shape.outputs, shape.inputs, 128
    if shape.kind == "int4":
        grouped = (LAYERS, width // group, out)
        weight = QuantizedWeight(
            _array(LAYERS, out, width // 2, dtype=jnp.uint8), _array(*grouped, dtype=jnp.float32),
            _array(*grouped, dtype=jnp.uint8), kind="int4",
        )  # fmt: skip
    else:
        stored = jnp.int8 if shape.kind == "int8" else jnp.float8_e4m3fn
        weight = QuantizedWeight(
            _array(LAYERS, out, width, dtype=stored), _array(LAYERS, out, dtype=jnp.float32), kind=shape.kind
        )

    def call(x: jax.Array, weight: QuantizedWeight, layer: jax.Array) -> jax.Array:
        return quantized_matmul(x, weight, layer=layer, backend=cast(Any, chosen))

    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weight)) / LAYERS
    return Call(
        call,
        (_array(T, width, dtype=jnp.bfloat16), weight, _array()),
        flops=2 * T * out * width,
        bytes=held + T * (width + out) * 2,
        products="bfloat16" if shape.kind == "int4" else shape.kind,
    )


OPS: dict[str, Callable[[Shape, Backend], Call]] = {
    "ragged_paged_attention": attention,
    "flash_attention": dense_attention,
    "kv_write": kv_write,
    "page_copy": page_copy,
    "quantized_matmul": matmul,
}
