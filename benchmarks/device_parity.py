"""Whether a kernel on the device that is here does what plain XLA does in float32 on the CPU, on ragged batches with poison.

Memory that a kernel must not use is NaN (127 in int8 pages, whose scales are NaN), and page-table entries beyond a sequence's
pages are out of range. An output is compared vector by vector, so that one wrong head or row is not lost among many right ones.
Of a pool, all that a call does not write must keep its bits. Each comparison is then repeated with mistakes planted in the output: one
that it does not see makes the case fail too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.device_cases import LAYER, SCALE_EXPONENTS, SPREAD, Case
from pallas_kernels.backends import Backend
from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.inspection.calls import LAYERS, layout_of
from pallas_kernels.kv_layout import KVLayout, KVPages, read_pages
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.page_copy.api import copy_pages
from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.weights import quantize
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention

LIMIT = 1.5e-2
"""Norm of the difference over the norm of what is expected. 8-bit pools are compared with what they hold, so that only the rounding to
bfloat16 is left, or in a KV write a few numbers that are rounded the other way."""
Host = np.ndarray[Any, Any]


def check(case: Case, backend: Backend) -> dict[str, Any]:
    """error: the largest relative norm of a vector's difference. stray: numbers of a pool that should be other than they are.
    unseen: planted mistakes that the comparison takes for right."""
    layout = layout_of(case.shape, backend)
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        held = INPUTS[case.op](case, layout)
    in_place = (0,) if case.op in ("kv_write", "page_copy") else ()
    program = jax.jit(kernel(case, layout, backend), donate_argnums=in_place)
    out = jax.device_get(program(*jax.tree.map(jnp.array, held)))
    with jax.default_device(cpu), jax.default_matmul_precision("float32"):
        expected = None if case.op == "page_copy" else _expected(case, layout, held)
        written = _to_be_written(layout, held) if case.op == "kv_write" else None
        error, stray = _compare(case, layout, held, written, out, expected)
        if not np.isfinite(error):
            return {"failed": "the output holds NaN or infinity", "passed": False}
        found = {
            name: _compare(case, layout, held, written, wrong, expected)
            for name, wrong in _planted(case, held, written, out).items()
        }
    unseen = [name for name, numbers in found.items() if _is_right(*numbers)]
    return {
        "error": error, "limit": LIMIT, "stray": stray, "unseen": unseen, "passed": _is_right(error, stray) and not unseen,
    }  # fmt: skip


def _is_right(error: float, stray: int) -> bool:
    return error < LIMIT and stray == 0


def _compare(case: Case, layout: KVLayout, held: Any, written: Any, out: Any, expected: Any) -> tuple[float, int]:
    """(error, stray) of an output. written: of a KV write, which numbers of the pool it may change."""
    if case.op == "page_copy":
        return 0.0, _stray_of_copy(held, out)
    if case.op == "kv_write":
        return _errors_of_write(layout, held, written, out, expected)
    return _error_of_rows(case, out, expected), 0


def _planted(case: Case, held: Any, written: Any, out: Any) -> dict[str, Any]:
    """Outputs with a mistake each, as small as the comparison is to see."""
    wrong = jax.tree.map(lambda leaf: np.array(leaf), out)
    if case.op not in ("kv_write", "page_copy"):
        rows = sum(queries for queries, _ in case.lens) if case.op == "ragged_paged_attention" else len(wrong)
        norms = np.linalg.norm(np.asarray(wrong[:rows], np.float32), axis=-1)
        largest = np.unravel_index(np.argmax(norms), norms.shape)
        wrong[largest] = wrong[largest] * np.array(1 + 4 * LIMIT, wrong.dtype)
        return {"one vector too large": wrong}
    page = wrong.pages[LAYER, held[2][0]] if case.op == "page_copy" else wrong.pages[1 - LAYER, 0]
    page.view(f"u{page.itemsize}").reshape(-1)[-1] ^= 1
    mistakes = {"one number wrong": wrong}
    if case.op == "kv_write":
        mistakes["nothing written"] = dataclasses.replace(out, pages=np.where(written.pages, held[0].pages, out.pages))
    return mistakes


def kernel(case: Case, layout: KVLayout, backend: Backend) -> Callable[..., Any]:
    """The op of a case as a function of its inputs."""
    options: dict[str, Any] = {"sliding_window": case.sliding_window, "logit_soft_cap": case.logit_soft_cap}
    scale = case.shape.head_dim**-0.5
    table: dict[str, Callable[..., Any]] = {
        "ragged_paged_attention": lambda q, kv, sinks, *tables: ragged_paged_attention(
            q, kv, *tables, layout=layout, scale=scale, sinks=sinks, backend=backend, **options
        ),
        "flash_attention": lambda q, k, v, sinks, q_lens, kv_lens: flash_attention(
            q, k, v, scale=scale, causal=True, q_lens=q_lens, kv_lens=kv_lens, sinks=sinks, backend=backend, **options
        ),
        "kv_write": lambda kv, *rows: write_kv(kv, *rows, layout=layout, backend=backend),
        "page_copy": lambda kv, *ids: copy_pages(kv, *ids, layout=layout, backend=backend),
        "quantized_matmul": lambda x, weight, layer: quantized_matmul(
            x, weight, layer=layer, backend=cast(Any, "reference" if backend == "cpu_native" else backend)
        ),
    }
    return table[case.op]


def _expected(case: Case, layout: KVLayout, held: Any) -> Any:
    """The op by plain XLA on the CPU, every bfloat16 array in float32."""
    if layout.dtype == "bfloat16":
        layout = dataclasses.replace(layout, dtype="float32")
    wide = jax.tree.map(lambda a: jnp.array(a, jnp.float32 if a.dtype == jnp.bfloat16 else a.dtype), held)
    return jax.device_get(jax.jit(kernel(case, layout, "reference"))(*wide))


def _normal(rng: np.random.Generator, *dims: int) -> Host:
    return rng.standard_normal(dims, np.float32).astype(ml_dtypes.bfloat16)


def _sinks(case: Case) -> Host | None:
    return np.linspace(-1, 3, case.shape.num_heads, dtype=np.float32) if case.sinks else None


def _pool(rng: np.random.Generator, layout: KVLayout, num_pages: int) -> KVPages:
    dims, scales = layout.pages_shape(num_pages), layout.scales_shape(num_pages)
    numbers = rng.standard_normal(dims, np.float32)
    if scales is None:
        return KVPages(cast(Any, numbers.astype(layout.dtype)))
    pages = np.clip(numbers * SPREAD, -127, 127).astype(jnp.dtype(layout.dtype))
    return KVPages(cast(Any, pages), cast(Any, np.exp2(rng.integers(*SCALE_EXPONENTS, scales)).astype(np.float32)))


def _written(layout: KVLayout, like: KVPages, pages: Host, offsets: Host) -> KVPages:
    """Which numbers of a pool belong to the tokens at (pages, offsets) of LAYER: bool arrays, found by writing to a pool of zeros."""
    ones = jnp.ones((len(pages), layout.num_kv_heads, layout.head_dim), jnp.float32)
    empty = jax.tree.map(jnp.zeros_like, like)
    out = write_kv(empty, jnp.int32(LAYER), ones, ones, jnp.array(pages), jnp.array(offsets), layout=layout)
    marks: KVPages = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32) != 0, out)
    return marks


def _attention_inputs(case: Case, layout: KVLayout) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    lens = np.array([context for _, context in case.lens])
    counts = -(-lens // layout.page_size)
    P, S = int(counts.sum()) + 3, len(lens) + 2
    page_table = rng.choice(np.array([-1, 2**30, -(2**31), P - 1]), (S, counts.max() + 2)).astype(np.int32)
    ids = iter(rng.permutation(P))
    for row, count in zip(page_table, counts, strict=False):
        row[:count] = [next(ids) for _ in range(count)]
    pages = np.concatenate([row[np.arange(n) // layout.page_size] for row, n in zip(page_table, lens, strict=False)])
    kv = _pool(rng, layout, P)
    used = _written(layout, kv, pages, np.concatenate([np.arange(n) % layout.page_size for n in lens]))
    kv.pages[~used.pages] = 127 if layout.dtype == "int8" else np.nan
    if kv.scales is not None:
        kv.scales[~used.scales] = np.nan  # type: ignore[operator]
    ends = np.cumsum([queries for queries, _ in case.lens])
    cu_q_lens = np.concatenate([[0], ends, [ends[-1]] * 2]).astype(np.int32)
    q = _normal(rng, int(ends[-1]) + 3, case.shape.num_heads, layout.head_dim)
    kv_lens = np.concatenate([lens, [7, 7]]).astype(np.int32)
    return q, kv, _sinks(case), np.int32(LAYER), page_table, cu_q_lens, kv_lens, np.int32(len(lens))


def _dense_inputs(case: Case, _: KVLayout) -> tuple[Any, ...]:
    rng, (q_lens, kv_lens) = np.random.default_rng(0), np.array(case.lens, np.int32).T
    arrays = []
    for lens, heads in ((q_lens, case.shape.num_heads), *((kv_lens, case.shape.num_kv_heads),) * 2):
        array = _normal(rng, len(lens), lens.max(), heads, case.shape.head_dim)
        array[np.arange(lens.max()) >= lens[:, None]] = np.nan
        arrays.append(array)
    return *arrays, _sinks(case), q_lens, kv_lens


def _write_inputs(case: Case, layout: KVLayout) -> tuple[Any, ...]:
    """A run of tokens across the end of a page, tokens of other sequences, two rows of padding; vectors of many sizes.

    As in a step, tokens that share 16 places of a page follow each other: the TPU kernel counts on that.
    """
    rng, (T, K, D) = np.random.default_rng(0), (case.shape.tokens, layout.num_kv_heads, layout.head_dim)
    P = T + 4
    run = layout.page_size - 4 + np.arange(8)
    tiles = rng.permutation((P - 3) * layout.page_size // 16)[: T - 10]
    apart = 2 * layout.page_size + 16 * tiles + rng.integers(0, 16, T - 10)
    slots = np.concatenate([run, apart])
    ids = rng.permutation(P - 1)
    pages = np.concatenate([ids[slots // layout.page_size], [P - 1] * 2]).astype(np.int32)
    offsets = np.concatenate([slots % layout.page_size, [0, 1]]).astype(np.int32)
    rows = [_normal(rng, T, K, D) * np.exp2(rng.integers(-4, 4, (T, K, 1))).astype(ml_dtypes.bfloat16) for _ in "kv"]
    return _pool(rng, layout, P), np.int32(LAYER), *rows, pages, offsets


def _copy_inputs(case: Case, layout: KVLayout) -> tuple[Any, ...]:
    """Pairs, one source of two targets, and two pairs of padding."""
    rng, N = np.random.default_rng(0), case.shape.tokens // 2
    P = 2 * N + 4
    ids = rng.permutation(P - 1).astype(np.int32)
    sources, targets = ids[:N].copy(), ids[N : 2 * N]
    sources[1] = sources[0]
    trash = np.full(2, P - 1, np.int32)
    return _pool(rng, layout, P), np.concatenate([sources, ids[:2]]), np.concatenate([targets, trash])


def _matmul_inputs(case: Case, _: KVLayout) -> tuple[Any, ...]:
    rng, shape = np.random.default_rng(0), case.shape
    weight = rng.standard_normal((LAYERS, shape.outputs, shape.inputs), np.float32)
    weight *= np.exp2(rng.integers(*SCALE_EXPONENTS, (LAYERS, shape.outputs, 1)))
    return _normal(rng, shape.tokens, shape.inputs), quantize(weight, shape.kind), np.int32(LAYER)


INPUTS: dict[str, Callable[[Case, KVLayout], tuple[Any, ...]]] = {
    "ragged_paged_attention": _attention_inputs,
    "flash_attention": _dense_inputs,
    "kv_write": _write_inputs,
    "page_copy": _copy_inputs,
    "quantized_matmul": _matmul_inputs,
}


def _distance(actual: Any, expected: Any) -> float:
    """The largest relative norm of the difference of vectors along the last axis; infinite where one is not finite."""
    actual, expected = (np.asarray(array, np.float64) for array in (actual, expected))
    if not np.isfinite(actual).all():
        return float("inf")
    norms = np.linalg.norm(expected, axis=-1)
    return float(np.max(np.linalg.norm(actual - expected, axis=-1) / np.maximum(norms, 1e-30)))


def _error_of_rows(case: Case, out: Host, expected: Host) -> float:
    if case.op != "ragged_paged_attention":
        return _distance(out, expected)
    rows = sum(queries for queries, _ in case.lens)
    padding_is_finite = np.isfinite(np.asarray(out[rows:], np.float32)).all()
    return _distance(out[:rows], expected[:rows]) if padding_is_finite else float("inf")


def _tokens(kv: KVPages, pages: Host, offsets: Host, layout: KVLayout) -> Host:
    """The keys and values of LAYER at (pages, offsets) as floats, [2 * T, K * D]."""
    by_page = read_pages(jax.tree.map(jnp.array, kv), jnp.int32(LAYER), jnp.array(pages), layout, jnp.dtype("float32"))
    rows = [np.asarray(part, np.float32)[np.arange(len(pages)), :, offsets] for part in by_page]
    return np.concatenate(rows).reshape(2 * len(pages), -1)


def _to_be_written(layout: KVLayout, held: Any) -> KVPages:
    """Which numbers of a pool a KV write gives, those of the trash page left out."""
    before, _, _, _, pages, offsets = held
    real = pages != before.pages.shape[1] - 1
    return _written(layout, before, pages[real], offsets[real])


def _errors_of_write(
    layout: KVLayout, held: Any, written: KVPages, out: KVPages, expected: KVPages
) -> tuple[float, int]:
    """Of the vectors that were to be written, and of their scales; numbers that changed elsewhere. The trash page may hold anything."""
    before, _, _, _, pages, offsets = held
    real = pages != before.pages.shape[1] - 1
    wide = dataclasses.replace(layout, dtype="float32") if layout.dtype == "bfloat16" else layout
    error = _distance(
        _tokens(out, pages[real], offsets[real], layout), _tokens(expected, pages[real], offsets[real], wide)
    )
    if out.scales is not None:
        found, wanted = (np.asarray(kv.scales)[written.scales][:, None] for kv in (out, expected))
        error = max(error, _distance(found, wanted))
    stray = 0
    for now, old, mark in zip(*map(jax.tree.leaves, (out, before, written)), strict=True):
        changed = _differ(now, old) & ~mark
        changed[LAYER, -1] = False
        stray += int(np.sum(changed))
    return error, stray


def _stray_of_copy(held: Any, out: KVPages) -> int:
    before, sources, targets = held
    stray = 0
    for now, old in zip(jax.tree.leaves(out), jax.tree.leaves(before), strict=True):
        real, wanted = targets != old.shape[1] - 1, old.copy()
        wanted[:, targets[real]] = old[:, sources[real]]
        stray += int(np.sum(_differ(now, wanted)))
    return stray


def _differ(a: Host, b: Host) -> Host:
    """Which numbers differ in any bit."""
    bits = (np.ascontiguousarray(array).view(f"u{array.itemsize}") for array in (a, b))
    return cast(Host, np.not_equal(*bits))
