"""Dense attention on TPU: blocks of keys and values stream through VMEM past a block of queries (FlashAttention-2's loop).

The query heads of a KV head are stacked as rows of one matmul, so that each block of keys is read once for all of them. Heads
are lanes of [B, T, heads * head_dim], the shape that projections make, so that nothing is transposed; with head_dim 64 two KV heads
share the 128 lanes of a register, and queries are zero in the lanes of the other one. The softmax runs in float32, base 2.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.mosaic_tpu_stream import CURSOR_SIZE, SLOTS, Stream
from pallas_kernels.flash_attention.tuning import Blocks
from pallas_kernels.packed_rows_tpu import row_bits
from pallas_kernels.scoring import LOG2E, Scoring

KERNEL_NAME = "flash_attention"
LANES = 128
SUBLANES = 8
DTYPES = ("bfloat16", "float32")
_NOTHING = -1e30
"""The running maximum before any key: finite, so that masked keys (-inf) against it weigh 0, not NaN."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Static choices of one call. pair: KV heads in one block of lanes. group: query heads of a KV head.

    queries, keys: tokens of a query block (a power of two) and of a key block. vmem_limit: bytes.
    """

    head_dim: int
    pair: int
    group: int
    queries: int
    keys: int
    vmem_limit: int

    @property
    def lanes(self) -> int:
        return self.pair * self.head_dim

    @property
    def heads(self) -> int:
        """Query heads in one block."""
        return self.pair * self.group

    @property
    def rows(self) -> int:
        return self.heads * self.queries


def make_plan(q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: Any, blocks: Blocks) -> Plan:
    """Blocks for arrays of these shapes: those of the tuning file, but not longer than there are tokens.

    A query block has at most twice as many tokens as a key block: under a causal mask long ones waste the products above the diagonal.
    """
    (Tq, H, D), (Tk, K) = q_shape[1:], k_shape[1:3]
    pair = max(LANES // D, 1)
    group = H // K
    least = SUBLANES * 4 // jnp.dtype(dtype).itemsize
    queries = least
    keys = min(blocks.keys, -(-Tk // LANES) * LANES)
    while queries < min(Tq, 2 * keys) and queries * 2 * pair * group <= blocks.rows:
        queries *= 2
    return Plan(D, pair, group, queries, keys, blocks.vmem_limit)


def attend(
    q: Float[Array, "B Tq H D"],
    k: Float[Array, "B Tk K D"],
    v: Float[Array, "B Tk K D"],
    q_lens: Int[Array, " B"],
    kv_lens: Int[Array, " B"],
    sinks: Float[Array, " H"] | None,
    *,
    scoring: Scoring,
    blocks: Blocks,
    interpret: Any = False,
) -> Float[Array, "B Tq H D"]:
    """Contract: `pallas_kernels.flash_attention.api`. `interpret` is `pl.pallas_call`'s."""
    B, Tq, H, D = q.shape
    packing = 4 // q.dtype.itemsize
    plan = make_plan(q.shape, k.shape, q.dtype, blocks)
    # An odd number of narrow KV heads gets one more; queries become whole blocks, keys whole registers.
    odd = k.shape[2] % plan.pair
    q = jnp.pad(q, ((0, 0), (0, -Tq % plan.queries), (0, odd * plan.group), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % (SUBLANES * packing)), (0, odd), (0, 0))) for x in (k, v))
    sinks = None if sinks is None else jnp.pad(sinks.astype(jnp.float32) * LOG2E, (0, odd * plan.group))
    q, k, v = (x.reshape(*x.shape[:2], -1) for x in (q, k, v))
    items, groups = q.shape[1] // plan.queries, k.shape[2] // plan.lanes

    tile = pl.BlockSpec((None, plan.queries, plan.heads * D), lambda g, i, *_: (g // groups, i, g % groups))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out: Array = pl.pallas_call(
        functools.partial(_kernel, scoring=scoring, plan=plan, groups=groups, items=items, has_sinks=sinks is not None),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2 if sinks is None else 3,
            grid=(B * groups, items),
            in_specs=[tile, anywhere, anywhere],
            out_specs=tile,
            scratch_shapes=[
                pltpu.VMEM((plan.rows, plan.lanes), q.dtype),
                pltpu.VMEM((plan.rows, LANES), jnp.float32),
                pltpu.VMEM((plan.rows, LANES), jnp.float32),
                pltpu.VMEM((plan.rows, plan.lanes), jnp.float32),
                pltpu.VMEM((SLOTS, plan.keys, plan.lanes), k.dtype),
                pltpu.VMEM((SLOTS, plan.keys, plan.lanes), v.dtype),
                pltpu.SemaphoreType.DMA((SLOTS,)),
                pltpu.SMEM((CURSOR_SIZE,), jnp.int32),
            ],
        ),
        # KV heads are shared out over the cores of a chip; the stream of one head's blocks runs through all of its queries.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=plan.vmem_limit
        ),
        interpret=interpret,
        name=KERNEL_NAME,
    )(q_lens, kv_lens, *([] if sinks is None else [sinks]), q, k, v)
    return out.reshape(B, -1, H + odd * plan.group, D)[:, :Tq, :H]


def _kernel(
    q_lens: Any, kv_lens: Any, *refs: Any, scoring: Scoring, plan: Plan, groups: int, items: int, has_sinks: bool
) -> None:
    sinks = refs[0] if has_sinks else None
    q_ref, k_hbm, v_hbm, out_ref, rows_ref, top_ref, total_ref, acc_ref, k_buf, v_buf, sems, cursor = refs[has_sinks:]
    batch, item = lax.div(pl.program_id(0), groups), pl.program_id(1)
    kv_group = lax.rem(pl.program_id(0), groups)
    q_len, kv_len = q_lens[batch], kv_lens[batch]

    def blocks(item: Any) -> tuple[Any, Any]:
        first = item * plan.queries
        return scoring.blocks(first, first + plan.queries - 1, q_len, kv_len, plan.keys)

    lane = pl.multiple_of(kv_group * plan.lanes, LANES)
    stream = Stream(blocks, items, batch, lane, k_hbm, v_hbm, k_buf, v_buf, sems, cursor)
    pl.when(item == 0)(stream.start)

    top_ref[...] = jnp.full_like(top_ref, _NOTHING)
    total_ref[...] = jnp.zeros_like(total_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    _stack_queries(q_ref, rows_ref, plan)
    first_query = item * plan.queries
    seen_by_all = scoring.seen_by_all(first_query, first_query + plan.queries - 1, q_len, kv_len)

    def visit(step: Any, carry: None) -> None:  # noqa: ARG001
        block = begin + step
        slot = stream.next_block(block)
        start = block * plan.keys
        whole = (start >= seen_by_all[0]) & (start + plan.keys <= seen_by_all[1])
        fold = functools.partial(
            _fold, rows_ref, k_buf.at[slot], v_buf.at[slot], top_ref, total_ref, acc_ref, plan=plan, scoring=scoring
        )
        pl.when(whole)(fold)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            _zero_tail(v_buf.at[slot], kv_len - start)
            fold(mask=_Mask(first_query + kv_len - q_len - start, kv_len - start))

    begin, count = blocks(item)
    lax.fori_loop(0, count, visit, None)
    _write(out_ref, top_ref, total_ref, acc_ref, sinks, kv_group * plan.heads, q_len - first_query, plan)


@dataclasses.dataclass(frozen=True)
class _Mask:
    """position: of the first query, and keys: how many there are, both from the start of the key block on."""

    position: Any
    keys: Any

    def seen(self, shape: tuple[int, ...], plan: Plan, scoring: Scoring) -> Array:
        column = lax.broadcasted_iota(jnp.int32, shape, 1)
        token = lax.broadcasted_iota(jnp.int32, shape, 0) & (plan.queries - 1)
        ahead = column - token
        seen: Array = ahead <= self.position if scoring.causal else column < self.keys
        if scoring.sliding_window is not None:
            seen &= ahead > self.position - scoring.sliding_window
        return seen


def _fold(
    rows_ref: Any,
    k_ref: Any,
    v_ref: Any,
    top_ref: Any,
    total_ref: Any,
    acc_ref: Any,
    *,
    plan: Plan,
    scoring: Scoring,
    mask: _Mask | None = None,
) -> None:
    """Folds one block of keys into the running softmax."""
    score = _dot(rows_ref[...], k_ref[...], 1)
    if scoring.logit_soft_cap is None:
        score = score * (scoring.scale * LOG2E)
    else:
        score = jnp.tanh(score * (scoring.scale / scoring.logit_soft_cap)) * (scoring.logit_soft_cap * LOG2E)
    if mask is not None:
        score = jnp.where(mask.seen(score.shape, plan, scoring), score, -jnp.inf)
    top = top_ref[...]
    new_top = jnp.maximum(top, jnp.max(score, axis=1, keepdims=True))
    weights = jnp.exp2(score - _across(new_top, plan.keys))
    shrink = jnp.exp2(top - new_top)
    top_ref[...] = new_top
    chunks = [weights[:, i : i + LANES] for i in range(0, plan.keys, LANES)]
    total_ref[...] = total_ref[...] * shrink + functools.reduce(jnp.add, chunks)  # lanes are added up at the end
    acc_ref[...] = acc_ref[...] * _across(shrink, plan.lanes) + _dot(weights.astype(v_ref.dtype), v_ref[...], 0)


def _dot(a: Array, b: Array, contract_b: int) -> Array:
    """a [rows, c] times b, contracted over b's axis `contract_b`, in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((1,), (contract_b,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _across(x: Array, width: int) -> Array:
    """x [rows, 128], the same number in all lanes, as [rows, width]: registers are reused, no lane moves."""
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def _zero_tail(values: Any, valid: Any) -> None:
    """Zeroes the rows from `valid` on: they may hold NaN, and a weight of 0 would not hide it."""
    packing = 4 // values.dtype.itemsize
    size, lanes = values.shape

    @pl.when(valid < size)
    def _() -> None:
        keep = row_bits((size // packing, lanes), packing, 0, valid)
        values[...] = pltpu.bitcast(pltpu.bitcast(values[...], jnp.int32) & keep, values.dtype)


def _stack_queries(q_ref: Any, rows_ref: Any, plan: Plan) -> None:
    """[queries, heads * D] as [heads * queries, lanes], each head in the lanes of its KV head."""
    for head in range(plan.heads):
        if plan.pair == 1:
            row = q_ref[:, head * plan.lanes : (head + 1) * plan.lanes]
        else:
            both = q_ref[:, head // 2 * LANES : (head // 2 + 1) * LANES].astype(jnp.float32)
            place = head // plan.group
            row = _only_half(_swap_halves(both) if head % 2 != place else both, place).astype(rows_ref.dtype)
        rows_ref[head * plan.queries : (head + 1) * plan.queries, :] = row


def _swap_halves(x: Array) -> Array:
    """[rows, 128] with the lower and the upper 64 lanes exchanged."""
    return pltpu.roll(x, LANES // 2, 1)


def _only_half(x: Array, half: int) -> Array:
    """[rows, 128] with zeros in the other 64 lanes."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) // (LANES // 2) == half, x, 0.0)


def _write(
    out_ref: Any, top_ref: Any, total_ref: Any, acc_ref: Any, sinks: Any, first_head: Any, valid: Any, plan: Plan
) -> None:
    """The results of `valid` queries, and zeros for the others."""
    real = lax.broadcasted_iota(jnp.int32, (plan.queries, plan.lanes), 0) < valid

    def result(head: int) -> Array:
        at = slice(head * plan.queries, (head + 1) * plan.queries)
        total, acc = jnp.sum(total_ref[at, :], axis=1, keepdims=True), acc_ref[at, :]
        if sinks is not None:
            # A sink is one more key, whose value is zero.
            sink, top = sinks[first_head + head], top_ref[at, :]
            new_top = jnp.maximum(top, sink)
            shrink = jnp.exp2(top - new_top)
            total = total * shrink[:, :1] + jnp.exp2(sink - new_top[:, :1])
            acc = acc * _across(shrink, plan.lanes)
        return jnp.where(real, acc / jnp.where(total == 0.0, 1.0, total), 0.0)

    def half(head: int) -> Array:
        """A head of 64 lanes in its place within two of them."""
        own = result(head)
        return _only_half(_swap_halves(own) if head % 2 != head // plan.group else own, head % 2)

    for i in range(plan.heads // plan.pair):
        register = result(i) if plan.pair == 1 else half(2 * i) + half(2 * i + 1)
        out_ref[:, i * plan.lanes : (i + 1) * plan.lanes] = register.astype(out_ref.dtype)
