"""Dense attention on Hopper (sm_90a): a warp-specialized kernel on FlashAttention-3's schedule (Shah et al. 2024).

A thread block owns 128 rows of queries of one head: two warpgroups multiply 64 of them each on `wgmma`, a third one brings queries,
keys and values by TMA, the latter two into a ring of tiles in shared memory. While the softmax of tile j runs, P V of tile j - 1 is
in the tensor cores; Q K^T of tile j was issued just before it. Tiles that no query of a warpgroup sees are not multiplied, tiles
that all see fully are not masked. Blocks with the most tiles come first.

A row is a token of one query head; with few tokens, where that would leave most rows empty, the query heads of a KV head are rows
of one block together (row = token * pack + head).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.mosaic_gpu_tiles import Ring, RowTile, zero_tail
from pallas_kernels.flash_attention.scoring import LOG2E, Scoring
from pallas_kernels.flash_attention.tuning import Tiles
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import NO_LOGIT, Ref, tiled

KERNEL_NAME = "flash_attention"
DTYPES = ("bfloat16", "float16")
ROWS = 64
"""Query rows of a warpgroup: the M of `wgmma`."""
CONSUMERS = 2
WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
_ALIGNED = 8
"""TMA cuts arrays into tiles of 8 rows."""


def attend(
    q: Float[Array, "B Tq H D"],
    k: Float[Array, "B Tk K D"],
    v: Float[Array, "B Tk K D"],
    q_lens: Int[Array, " B"],
    kv_lens: Int[Array, " B"],
    sinks: Float[Array, " H"] | None,
    *,
    scoring: Scoring,
    tiles: Tiles,
) -> Float[Array, "B Tq H D"]:
    """Contract: `pallas_kernels.flash_attention.api`."""
    kernel = make_kernel(q.shape, k.shape, scoring, tiles)
    (B, Tq, _, D), K, pack = q.shape, k.shape[2], kernel.pack
    rows = q
    if pack > 1:
        rows = q.reshape(B, Tq, K, pack, D).transpose(0, 1, 3, 2, 4).reshape(B, Tq * pack, K, D)
    rows, k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % _ALIGNED), (0, 0), (0, 0))) for x in (rows, k, v))
    lens = jnp.stack([q_lens, kv_lens], axis=1)
    inputs = [rows, k, v, lens] + ([] if sinks is None else [sinks.astype(jnp.float32) * LOG2E])
    out = kernel.call(*inputs)[:, : Tq * pack]
    if pack > 1:
        out = out.reshape(B, Tq, pack, K, D).transpose(0, 1, 3, 2, 4)
    return out.reshape(q.shape)


def make_kernel(q_shape: tuple[int, ...], k_shape: tuple[int, ...], scoring: Scoring, tiles: Tiles) -> Kernel:
    """The kernel for queries and keys of these shapes."""
    (B, Tq, H, D), (Tk, K) = q_shape, k_shape[1:3]
    pack = H // K if Tq < CONSUMERS * ROWS else 1
    num_tiles = -(-Tq * pack // (CONSUMERS * ROWS))
    return Kernel(scoring, tiles, B, pack, H // pack, H // pack // K, D, num_tiles, Tk + -Tk % _ALIGNED)


@dataclass(frozen=True)
class Kernel:
    """The kernel's code; fields are static.

    pack: query heads that are rows of one block. heads: of the array of rows, `group` of which share a KV head.
    num_tiles: thread blocks of a head. num_keys: rows of the arrays of keys and values.
    """

    scoring: Scoring
    tiles: Tiles
    batches: int
    pack: int
    heads: int
    group: int
    head_dim: int
    num_tiles: int
    num_keys: int

    def call(self, *inputs: Array) -> Array:
        dtype, D, keys, stages = inputs[0].dtype, self.head_dim, self.tiles.keys, self.tiles.stages
        return plgpu.kernel(  # type: ignore[no-any-return]
            self.body,
            out_type=jax.ShapeDtypeStruct(inputs[0].shape, dtype),
            grid=(self.num_tiles * self.batches * self.heads,),
            grid_names=("block",),
            num_threads=CONSUMERS + 1,
            thread_name="wg",
            kernel_name=KERNEL_NAME,
            compiler_params=plgpu.CompilerParams(approx_math=True),
            scratch_types={
                "rows": tiled((CONSUMERS, ROWS, D), dtype),
                "sums": plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
                "k": tiled((stages, keys, D), dtype),
                "v": tiled((stages, keys, D), dtype),
                "queries": plgpu.Barrier(num_barriers=CONSUMERS),
                "k_full": plgpu.Barrier(num_barriers=stages),
                "v_full": plgpu.Barrier(num_barriers=stages),
                "k_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
                "v_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
                "tail": plgpu.Barrier(),
            },
        )(*inputs)

    def body(self, q_ref: Ref, k_ref: Ref, v_ref: Ref, lens: Ref, *refs: Ref, **s: Ref) -> None:
        *sinks, out_ref = refs
        wg = lax.axis_index("wg")
        consumer_registers, producer_registers = self.tiles.registers

        def consume() -> None:
            plgpu.set_max_registers(consumer_registers, action="increase")
            self.consume(wg, lens, sinks[0] if sinks else None, out_ref, s)

        def produce() -> None:
            plgpu.set_max_registers(producer_registers, action="decrease")
            self.produce(q_ref, k_ref, v_ref, lens, s)

        # One or the other: with a sequence of `when`s, what later roles need would live through the consumers' code.
        lax.cond(wg < CONSUMERS, consume, produce)

    def rings(self, s: dict[str, Ref]) -> tuple[Ring, Ring]:
        key_ring, value_ring = (Ring(s[n], s[f"{n}_full"], s[f"{n}_free"], self.tiles.stages) for n in "kv")
        return key_ring, value_ring

    def tile(self, lens: Ref) -> RowTile:
        """This thread block's rows. With `causal`, the last rows see the most keys: they come first."""
        index, heads, batches = lax.axis_index("block"), jnp.int32(self.heads), jnp.int32(self.batches)
        head, rest = lax.rem(index, heads), lax.div(index, heads)
        batch = lax.rem(rest, batches)
        row = (self.num_tiles - 1 - lax.div(rest, batches)) * (CONSUMERS * ROWS)
        q_len, kv_len = lens[batch, 0], lens[batch, 1]
        low, count = self.key_tiles(row, CONSUMERS * ROWS, q_len, kv_len)
        kv_head = lax.div(head, jnp.int32(self.group))
        return RowTile(batch, row, head, kv_head, q_len, kv_len, low, low + count)

    def token(self, row: Any) -> Any:
        return row if self.pack == 1 else lax.div(row, jnp.int32(self.pack))

    def key_tiles(self, row: Any, rows: int, q_len: Any, kv_len: Any) -> tuple[Any, Any]:
        """(first, number) of the key tiles that `rows` rows from `row` on see between them."""
        return self.scoring.blocks(self.token(row), self.token(row + rows - 1), q_len, kv_len, self.tiles.keys)

    def produce(self, q_ref: Ref, k_ref: Ref, v_ref: Ref, lens: Ref, s: dict[str, Ref]) -> None:
        """Copies queries, and tiles of keys and values into their rings."""
        tile, keys = self.tile(lens), self.tiles.keys
        key_ring, value_ring = self.rings(s)

        @pl.when(tile.high > tile.low)
        def _queries() -> None:
            for wg in range(CONSUMERS):
                rows = pl.ds(pl.multiple_of(tile.row + wg * ROWS, ROWS), ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[tile.batch, rows, tile.head], s["rows"].at[wg], s["queries"].at[wg])

        # Rows beyond the array come as zeros; those between the sequence's end and the array's may hold NaN.
        unclean = jnp.where(tile.kv_len < self.num_keys, lax.div(tile.kv_len, jnp.int32(keys)), tile.high)

        @pl.loop(tile.low, tile.high)
        def _copy(j: Array) -> None:
            t = j - tile.low
            at = pl.ds(pl.multiple_of(j * keys, keys), keys)
            k_tile = key_ring.claim(t)
            plgpu.copy_gmem_to_smem(k_ref.at[tile.batch, at, tile.kv_head], k_tile, key_ring.full.at[key_ring.slot(t)])
            v_tile, full = value_ring.claim(t), value_ring.full.at[value_ring.slot(t)]
            source = v_ref.at[tile.batch, at, tile.kv_head]
            pl.when(j != unclean)(lambda: plgpu.copy_gmem_to_smem(source, v_tile, full))

            @pl.when(j == unclean)
            def _cleaned() -> None:
                plgpu.copy_gmem_to_smem(source, v_tile, s["tail"])
                plgpu.barrier_wait(s["tail"])
                zero_tail(v_tile, tile.kv_len - j * keys)
                plgpu.barrier_arrive(full)

        # No barrier ends in a phase that its waiter has not seen: the interpreter of JAX 0.11 insists.
        @pl.loop(tile.high - tile.low, tile.high - tile.low + self.tiles.stages)
        def _drain(t: Array) -> None:
            for ring in (key_ring, value_ring):
                ring.claim(t)

    def consume(self, wg: Array, lens: Ref, sinks: Ref | None, out_ref: Ref, s: dict[str, Ref]) -> None:
        """Attention of one warpgroup's 64 rows."""
        tile = self.tile(lens)
        row = tile.row + wg * ROWS
        low, count = self.key_tiles(row, ROWS, tile.q_len, tile.kv_len)
        low = jnp.where(count > 0, low, tile.high)
        high = low + count
        key_ring, value_ring = self.rings(s)

        def skip(j: Array) -> None:
            for ring in (key_ring, value_ring):
                ring.wait(j - tile.low)
                ring.release(j - tile.low)

        pl.loop(tile.low, low)(skip)
        pl.when(count > 0)(lambda: self.attend(wg, tile, row, low, high, sinks, out_ref, s))
        pl.loop(high, tile.high)(skip)

        @pl.when(count == 0)
        def _nothing() -> None:
            # Its queries come all the same, if the other warpgroup's do: not over what is written there.
            pl.when(tile.high > tile.low)(lambda: plgpu.barrier_wait(s["queries"].at[wg]))
            zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.head_dim), jnp.float32), WGMMA)
            self.write(zeros, out_ref, s["rows"].at[wg], tile, row)

    def attend(
        self,
        wg: Array,
        tile: RowTile,
        row: Array,
        low: Array,
        high: Array,
        sinks: Ref | None,
        out_ref: Ref,
        s: dict[str, Ref],
    ) -> None:
        """Attention over the key tiles [low, high), of which there is one at least."""
        N, D = self.tiles.keys, self.head_dim
        key_ring, value_ring = self.rings(s)
        plgpu.barrier_wait(s["queries"].at[wg])

        def start_keys(out: Ref, j: Array) -> None:
            plgpu.wgmma(out, s["rows"].at[wg], key_ring.wait(j - tile.low).transpose((1, 0)))

        def first(dots_ref: Ref) -> Array:
            start_keys(dots_ref, low)
            return dots_ref[...]

        accumulator = plgpu.WGMMAAccumulatorRef((ROWS, D), jnp.float32)
        product = plgpu.WGMMAAccumulatorRef((ROWS, N), jnp.float32)
        dots = pl.run_scoped(first, product)
        key_ring.release(low - tile.low)
        top = plgpu.layout_cast(jnp.full((ROWS,), NO_LOGIT, jnp.float32), ROW)
        total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
        top, total, weights, _ = self.softmax(dots, low, tile, row, top, total, masked=True)
        acc = plgpu.layout_cast(jnp.zeros((ROWS, D), jnp.float32), WGMMA)

        def step(j: Array, carry: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
            acc, top, total, weights = carry

            def overlapped(dots_ref: Ref, acc_ref: Ref) -> tuple[Any, ...]:
                acc_ref[...] = acc
                start_keys(dots_ref, j)
                plgpu.wgmma(acc_ref, weights, value_ring.wait(j - 1 - tile.low))
                dots = plgpu.wgmma_accumulator_load(dots_ref, wait_n=1)
                key_ring.release(j - tile.low)
                new_top, new_total, new_weights, shrink = self.softmax(dots, j, tile, row, top, total, masked)
                # The store is there for its place alone: without a side effect that needs the softmax, ptxas puts the wait for P V
                # before the softmax, which is to run meanwhile. The barrier keeps the conversion after the wait: until then the
                # registers that hold `weights` are being read.
                s["sums"].at[wg][...] = new_total
                gained, new_weights = lax.optimization_barrier((acc_ref[...], new_weights))
                value_ring.release(j - 1 - tile.low)
                gained = gained * lax.broadcast_in_dim(shrink, gained.shape, [0])
                return gained, new_top, new_total, new_weights.astype(weights.dtype)

            return pl.run_scoped(overlapped, product, accumulator)  # type: ignore[no-any-return]

        def loop(begin: Array, end: Array, carry: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
            return lax.fori_loop(begin, end, lambda j, c: step(j, c, masked), carry)  # type: ignore[no-any-return]

        # Tiles [begin, end) are seen by every query of the warpgroup.
        all_low, all_high = self.scoring.seen_by_all(
            self.token(row), self.token(row + ROWS - 1), tile.q_len, tile.kv_len
        )
        carry = (acc, top, total, weights.astype(s["v"].dtype))
        begin = low + 1
        if self.scoring.sliding_window is not None:
            begin = jnp.clip(lax.div(all_low + N - 1, jnp.int32(N)), low + 1, high)
            carry = loop(low + 1, begin, carry, masked=True)
        end = jnp.clip(lax.div(jnp.maximum(all_high, 0), jnp.int32(N)), begin, high)
        carry = loop(begin, end, carry, masked=False)
        acc, top, total, weights = loop(end, high, carry, masked=True)

        def last(acc_ref: Ref) -> Array:
            acc_ref[...] = acc
            plgpu.wgmma(acc_ref, weights, value_ring.wait(high - 1 - tile.low))
            return acc_ref[...]

        acc = pl.run_scoped(last, accumulator)
        value_ring.release(high - 1 - tile.low)
        self.finish(acc, top, total, sinks, out_ref, s["rows"].at[wg], tile, row)

    def softmax(
        self, dots: Array, j: Array, tile: RowTile, row: Array, top: Array, total: Array, masked: bool
    ) -> tuple[Array, Array, Array, Array]:
        """(top, total, weights, factor by which earlier results shrink). Scores are in base 2."""
        scores, factor = self.logits(dots)
        if masked:
            scores = jnp.where(self.seen(scores.shape, j, tile, row), scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=1) * factor)
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        return new_top, total * shrink + weights.sum(axis=1), weights, shrink

    def seen(self, shape: tuple[int, ...], j: Array, tile: RowTile, row: Array) -> Array:
        """Whether each row sees each key of tile j."""
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        if not self.scoring.causal:
            return column < tile.kv_len - j * self.tiles.keys
        own = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
        behind = self.token(row + own) + (tile.kv_len - tile.q_len - j * self.tiles.keys) - column
        if self.scoring.sliding_window is None:
            return behind >= 0
        return (behind >= 0) & (behind < self.scoring.sliding_window)

    def logits(self, dots: Array) -> tuple[Array, float]:
        """(x, factor) such that x * factor are the scores in base 2: the factor is part of the exponential's multiply-add."""
        cap = self.scoring.logit_soft_cap
        if cap is None:
            return dots, self.scoring.scale * LOG2E
        # tanh(x) = 1 - 2 / (1 + e^2x): exact to float32, where the hardware's tanh keeps only 11 bits.
        return 1.0 - 2.0 / (1.0 + jnp.exp2(dots * (2.0 * LOG2E * self.scoring.scale / cap))), cap * LOG2E

    def finish(
        self,
        acc: Array,
        top: Array,
        total: Array,
        sinks: Ref | None,
        out_ref: Ref,
        staged: Ref,
        tile: RowTile,
        row: Array,
    ) -> None:
        """Divides by the weights' sum, in which a sink is one more key whose value is zero, and writes the result."""
        if sinks is not None:
            sink = self.sinks_of_rows(sinks, tile, row)
            new_top = jnp.maximum(top, sink)
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + jnp.exp2(sink - new_top)
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
        self.write(acc * lax.broadcast_in_dim(inverse, acc.shape, [0]), out_ref, staged, tile, row)

    def sinks_of_rows(self, sinks: Ref, tile: RowTile, row: Array) -> Array:
        """The sink of each row's head, in base 2."""
        own = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 0, layout=WGMMA)
        if self.pack == 1:
            return lax.broadcast_in_dim(sinks[tile.head], own.shape, []).max(axis=1)  # type: ignore[no-any-return]
        head = lax.rem(row + own, jnp.int32(self.pack))
        out = jnp.zeros(own.shape, jnp.float32)
        for i in range(self.pack):
            sink = lax.broadcast_in_dim(sinks[tile.head * self.pack + i], own.shape, [])
            out = jnp.where(head == i, sink, out)
        return out.max(axis=1)

    def write(self, out: Array, out_ref: Ref, staged: Ref, tile: RowTile, row: Array) -> None:
        """Writes a warpgroup's rows by way of the shared memory of its queries; rows beyond the sequence's end as zeros."""
        own = plgpu.broadcasted_iota(jnp.int32, out.shape, 0, layout=WGMMA)
        out = jnp.where(self.token(row + own) < tile.q_len, out, 0.0).astype(staged.dtype)
        staged[...] = out
        plgpu.commit_smem()
        rows = pl.ds(pl.multiple_of(row, ROWS), ROWS)
        plgpu.copy_smem_to_gmem(staged, out_ref.at[tile.batch, rows, tile.head])
        plgpu.wait_smem_to_gmem(0)
