"""Attention of sequences with several queries (prefill chunks, draft verification) on Hopper.

It is warp-specialized and follows FlashAttention-3's schedule.

A work item is 128 query rows of one sequence and one KV head: two consumer warpgroups with 64 rows each. A
warpgroup's rows are `span` consecutive tokens times the `heads` query heads that share the KV head, row = head * span
+ token, so that K and V are read once for all of them. A third warpgroup issues the TMA copies of pages into rings of
shared memory; for 8-bit pages a fourth one converts them to 16 bits. The grid is persistent: items are sorted by cost
and dealt out in a snake.

Consumers overlap (Shah et al. 2024): while the softmax of tile j runs, P V of tile j - 1 is in the tensor cores; Q
K^T of tile j was issued just before it. Tiles that no query of a warpgroup sees are never multiplied, tiles that all
see fully are not masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import (
    LOG2E,
    NO_LOGIT,
    CallSpec,
    Ref,
    copy_tile,
    first_visible_key,
    pool_rows,
    scale_rows,
    scaled_dots,
    tiled,
)
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_plan import (
    CONSUMERS,
    ROWS,
    PrefillTuning,
    Shape,
    staged_columns,
)

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
ROW_BLOCKS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
"""Blocks of 8 x 64 elements spread over a warpgroup, 4 consecutive ones for each thread."""


def prefill(
    q: Float[Array, "T H D"],
    pages: Array,
    scales: Array | None,
    layer: Int[Array, ""],
    page_table: Int[Array, "S W"],
    tiles: Int[Array, "tiles 5"],
    counts: Int[Array, " 2"],
    sinks: Float[Array, " H"] | None,
    *,
    spec: CallSpec,
    tuning: PrefillTuning,
) -> Float[Array, "T H D"]:
    """Attention of the queries that `tiles` names. q has spec.compute_dtype, and T >= span.

    counts: the number of tiles in use, and the row from which on there is only padding: those rows are zero in the
    result. The rows of sequences that have no tile are not written.
    """
    columns = jnp.arange(tuning.keys, dtype=jnp.int32)
    inputs = [q, pool_rows(pages), layer.reshape(1).astype(jnp.int32), page_table, tiles, counts, columns]
    if scales is not None:
        inputs.append(scale_rows(scales))
    if sinks is not None:
        inputs.append(sinks.astype(jnp.float32) * LOG2E)
    D, keys, stages, converted = spec.head_dim, tuning.keys, tuning.stages, tuning.converted
    compute = spec.compute_dtype
    dynamic = spec.scales == "token"
    arrivals = spec.page_copies(keys) * (2 if dynamic else 1)

    def scaled_keys() -> Any:
        return plgpu.SMEM((stages, keys), jnp.float32) if dynamic else None

    kernel = _Kernel(spec, tuning, Shape.of(spec), pages.shape[1], q.shape[0], scales is not None)
    return plgpu.kernel(  # type: ignore[no-any-return]
        kernel.body,
        out_type=jax.ShapeDtypeStruct(q.shape, compute),
        grid=(tuning.num_blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + (2 if spec.quantized else 1),
        thread_name="wg",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types={
            "q_smem": tiled((CONSUMERS, ROWS, D), compute),
            "out_smem": plgpu.SMEM((CONSUMERS, ROWS, staged_columns(spec)), compute),
            "sums": plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
            "k_stored": tiled((stages, keys, D), pages.dtype),
            "v_stored": tiled((stages, keys, D), pages.dtype),
            "k_scale": scaled_keys(),
            "v_scale": scaled_keys(),
            "k_converted": tiled((converted, keys, D), compute) if spec.quantized else None,
            "v_converted": tiled((converted, keys, D), compute) if spec.quantized else None,
            # Few arrays of barriers rather than many barriers: each array costs the consumers a uniform register.
            "queries": plgpu.Barrier(num_barriers=2 * CONSUMERS),
            "full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=2 * stages),
            "free": plgpu.Barrier(num_arrivals=1 if spec.quantized else CONSUMERS, num_barriers=2 * stages + 1),
            "ready": plgpu.Barrier(num_barriers=2 * converted) if spec.quantized else None,
            "done": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=2 * converted) if spec.quantized else None,
        },
    )(*inputs)


@dataclass(frozen=True)
class _Item:
    """One work item, all scalars of the running kernel. `tiles` = [low, high) are the key tiles that its queries see
    together."""

    sequence: Array
    row: Array
    position: Array
    tokens: Array
    kv_len: Array
    kv_head: Array
    head: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class _Ring:
    """One ring of tiles: tile number t lies in slot t % slots. Its barriers are full[first + slot] and free[first +
    slot]."""

    tiles: Ref
    full: Ref
    free: Ref
    slots: int
    first: int

    def slot(self, t: Array) -> Array:
        return lax.rem(t, jnp.int32(self.slots))

    def wait(self, t: Array) -> Ref:
        """The tile, once it is full."""
        plgpu.barrier_wait(self.full.at[self.slot(t) + self.first])
        return self.tiles.at[self.slot(t)]

    def release(self, t: Array) -> None:
        plgpu.barrier_arrive(self.free.at[self.slot(t) + self.first])

    def claim(self, t: Array) -> Ref:
        """The tile's place, once its former tile is released; the first round finds it empty."""
        pl.when(t >= self.slots)(lambda: plgpu.barrier_wait(self.free.at[self.slot(t) + self.first]))
        return self.tiles.at[self.slot(t)]

    def publish(self, t: Array) -> None:
        plgpu.barrier_arrive(self.full.at[self.slot(t) + self.first])


@dataclass(frozen=True)
class _Kernel:
    """The kernel's code; fields are static. num_pages: of the pool. num_rows: T."""

    spec: CallSpec
    tuning: PrefillTuning
    shape: Shape
    num_pages: int
    num_rows: int
    has_scales: bool

    def stored(self, s: dict[str, Ref]) -> tuple[_Ring, _Ring]:
        """The rings of keys and of values as they come from the pool."""
        slots = self.tuning.stages
        return tuple(_Ring(s[f"{n}_stored"], s["full"], s["free"], slots, i * slots) for i, n in enumerate("kv"))  # type: ignore[return-value]

    def converted(self, s: dict[str, Ref]) -> tuple[_Ring, _Ring]:
        """The rings of 16-bit keys and values, for 8-bit pools."""
        slots = self.tuning.converted
        return tuple(_Ring(s[f"{n}_converted"], s["ready"], s["done"], slots, i * slots) for i, n in enumerate("kv"))  # type: ignore[return-value]

    def tail_clean(self, item: _Item, s: dict[str, Ref]) -> Ref:
        """The barrier of `clean_tail`. Its index is constant, but not to the compiler, which would otherwise spill its
        address."""
        return s["free"].at[2 * self.tuning.stages + jnp.where(item.tokens > 0, 0, 1)]

    def body(self, *refs: Ref, **scratch: Ref) -> None:
        q_ref, pool, layer_ref, table, tiles, num_tiles, columns, *rest, out_ref = refs
        scale_ref = rest.pop(0) if self.has_scales else None
        sink_ref = rest.pop(0) if self.spec.has_sinks else None
        wg = lax.axis_index("wg")
        quantized = self.spec.quantized
        consumers, converter, producer = (200, 72, 40) if quantized else (240, 0, 24)
        if not quantized and self.spec.head_dim == 64:
            consumers, producer = 216, 72

        def consume() -> None:
            plgpu.set_max_registers(consumers, action="increase")
            self.consume(wg, layer_ref, tiles, num_tiles, columns, scale_ref, sink_ref, out_ref, scratch)

        def produce() -> None:
            plgpu.set_max_registers(producer, action="decrease")
            self.produce(q_ref, pool, layer_ref, table, tiles, num_tiles, scale_ref, scratch)

        def convert() -> None:
            plgpu.set_max_registers(converter, action="decrease")
            self.convert(tiles, num_tiles, scratch)

        def copy_or_convert() -> None:
            lax.cond(wg == CONSUMERS, produce, convert) if quantized else produce()

        # One or the other: with a sequence of `when`s, what later roles need would live through the consumers' code.
        lax.cond(wg < CONSUMERS, consume, copy_or_convert)

    def for_items(self, tiles: Ref, num_tiles: Ref, visit: Callable[[Array, Array, _Item], None]) -> None:
        """Calls visit(index, tiles before it, item) for each item of this block."""

        def more(i: Array) -> Array:
            return self.work(i) < num_tiles[0] * (self.spec.num_kv_heads * self.shape.splits)

        def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            i, before, _ = carry
            item = self.item(tiles, i)
            visit(i, before, item)
            # Whether there are more is read from memory each time: a bound would sit in a register meanwhile.
            return i + 1, before + item.high - item.low, more(i + 1)

        lax.while_loop(lambda carry: carry[2], step, (jnp.int32(0), jnp.int32(0), more(jnp.int32(0))))

    def work(self, i: Array) -> Array:
        """The block's i-th place in the list of items: to and fro, so that early blocks do not get all of the longest."""
        block, blocks = lax.axis_index("block"), jnp.int32(self.tuning.num_blocks)
        return i * blocks + jnp.where(lax.rem(i, jnp.int32(2)) == 0, block, blocks - 1 - block)

    def item(self, tiles: Ref, i: Array) -> _Item:
        """The block's i-th item, read from global memory."""
        tile_heads = jnp.int32(self.spec.num_kv_heads * self.shape.splits)
        work = self.work(i)
        tile, tile_head = lax.div(work, tile_heads), lax.rem(work, tile_heads)
        sequence, row, position, tokens, kv_len = (tiles[tile, j] for j in range(5))
        low = lax.div(first_visible_key(self.spec, position), jnp.int32(self.tuning.keys))
        high = lax.div(position + tokens - 1, jnp.int32(self.tuning.keys)) + 1
        kv_head = lax.div(tile_head, jnp.int32(self.shape.splits))
        return _Item(sequence, row, position, tokens, kv_len, kv_head, tile_head * self.shape.heads, low, high)

    def rows_of(self, item: _Item, wg: Any) -> tuple[Array, Array, Array, Array]:
        """(first row, position of its token, first valid token, valid tokens) of one warpgroup's rows.

        The rows are moved back where they would pass the end of q; tokens before the first valid one are then not its
        own.
        """
        span = self.shape.span
        wanted = item.row + wg * span
        row = jnp.minimum(wanted, self.num_rows - span)
        tokens = jnp.clip(item.tokens - wg * span, 0, span)
        return row, item.position + row - item.row, wanted - row, tokens

    def produce(
        self,
        q_ref: Ref,
        pool: Ref,
        layer_ref: Ref,
        table: Ref,
        tiles: Ref,
        num_tiles: Ref,
        scale_ref: Ref | None,
        s: dict[str, Ref],
    ) -> None:
        """Copies queries, and the pages of keys and values into their rings."""
        spec = self.spec
        dynamic = spec.scales == "token"
        layer_row = layer_ref[0] * self.num_pages

        def visit(index: Array, before: Array, item: _Item) -> None:
            def copy(j: Array, t: Array) -> Array:
                for which, (name, ring) in enumerate(zip("kv", self.stored(s), strict=True)):
                    copy_tile(
                        spec,
                        pool=pool,
                        scales=scale_ref if dynamic else None,
                        first_row=lambda page, which=which: (
                            ((layer_row + page) * 2 + which) * spec.num_kv_heads + item.kv_head
                        ),
                        page_ids=table.at[item.sequence],
                        key0=j * self.tuning.keys,
                        kv_len=item.kv_len,
                        tile=ring.claim(t),
                        tile_scales=s[f"{name}_scale"].at[ring.slot(t)] if dynamic else None,
                        barrier=ring.full.at[ring.slot(t) + ring.first],
                    )
                # After the first tile, whose slot is free before the queries' is.
                pl.when(j == item.low)(lambda: self.load_queries(q_ref, index, item, s))
                return t + 1

            lax.fori_loop(item.low, item.high, copy, before)

        self.for_items(tiles, num_tiles, visit)

    def load_queries(self, q_ref: Ref, index: Array, item: _Item, s: dict[str, Ref]) -> None:
        """Brings the item's queries to shared memory, through registers: TMA would need rows aligned to 8."""
        span, D = self.shape.span, self.spec.head_dim
        rows = min(span, 2048 // D)
        together = 2048 // (rows * D)
        for wg in range(CONSUMERS):
            row, *_ = self.rows_of(item, wg)
            pl.when(index > 0)(lambda wg=wg: plgpu.barrier_wait(s["queries"].at[CONSUMERS + wg]))

            @pl.loop(0, ROWS // (rows * together))
            def _some(i: Array, wg: int = wg, row: Array = row) -> None:
                loaded = []
                for k in range(together):
                    at = pl.multiple_of((i * together + k) * rows, rows)
                    head, token = lax.div(at, jnp.int32(span)), lax.rem(at, jnp.int32(span))
                    source = q_ref.at[pl.ds(row + token, rows), item.head + head]
                    loaded.append((at, plgpu.load(source, layout=ROW_BLOCKS, optimized=False)))
                for at, block in loaded:
                    s["q_smem"].at[wg, pl.ds(at, rows)][...] = block

            plgpu.commit_smem()
            plgpu.barrier_arrive(s["queries"].at[wg])

    def convert(self, tiles: Ref, num_tiles: Ref, s: dict[str, Ref]) -> None:
        """Turns stored 8-bit tiles into 16-bit ones, with token scales applied and rows beyond the sequence's end as
        zeros."""
        spec, keys = self.spec, self.tuning.keys
        layout = plgpu.Layout.SMEM_GMEM_COPY((64, 64), spec.compute_dtype, 128)

        def visit(index: Array, before: Array, item: _Item) -> None:
            del index

            def tile(j: Array, t: Array) -> Array:
                for name, stored, converted in zip("kv", self.stored(s), self.converted(s), strict=True):
                    source, target = stored.wait(t), converted.claim(t)
                    scales = s[f"{name}_scale"].at[stored.slot(t)] if spec.scales == "token" else None

                    @pl.loop(0, (keys // 64) * (spec.head_dim // 64))
                    def _part(
                        i: Array, source: Ref = source, target: Ref = target, scales: Ref | None = scales
                    ) -> None:
                        first = pl.multiple_of(lax.rem(i, jnp.int32(keys // 64)) * 64, 64)
                        rows, columns = (
                            pl.ds(first, 64),
                            pl.ds(pl.multiple_of(lax.div(i, jnp.int32(keys // 64)) * 64, 64), 64),
                        )
                        values = plgpu.load(source.at[rows, columns], layout=layout, optimized=False).astype(
                            spec.compute_dtype
                        )
                        if scales is not None:
                            scale = plgpu.load(scales.at[rows], layout=layout.reduce(1), optimized=False)
                            values = values.astype(jnp.float32) * lax.broadcast_in_dim(scale, values.shape, [0])
                            values = values.astype(spec.compute_dtype)
                        row = first + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=layout)
                        values = jnp.where(row < item.kv_len - j * keys, values, jnp.zeros_like(values))
                        target.at[rows, columns][...] = values

                    plgpu.commit_smem()
                    stored.release(t)
                    converted.publish(t)
                return t + 1

            lax.fori_loop(item.low, item.high, tile, before)

        self.for_items(tiles, num_tiles, visit)

    def consume(
        self,
        wg: Array,
        layer_ref: Ref,
        tiles: Ref,
        num_tiles: Ref,
        columns: Ref,
        scale_ref: Ref | None,
        sink_ref: Ref | None,
        out_ref: Ref,
        s: dict[str, Ref],
    ) -> None:
        """Attention of one warpgroup's 64 rows, item after item."""
        spec, shape, N = self.spec, self.shape, self.tuning.keys
        key_ring, value_ring = self.converted(s) if spec.quantized else self.stored(s)

        def visit(index: Array, before: Array, item: _Item) -> None:
            _, position, _, tokens = self.rows_of(item, wg)
            own_first = item.position + wg * shape.span
            own_last = own_first + tokens - 1
            low = jnp.where(tokens > 0, lax.div(first_visible_key(spec, own_first), jnp.int32(N)), item.high)
            high = jnp.where(tokens > 0, lax.div(own_last, jnp.int32(N)) + 1, item.high)
            number = before - item.low  # of tile j in the rings is number + j

            def skip(j: Array, carry: None) -> None:
                del carry
                for ring in (key_ring, value_ring):
                    ring.wait(number + j)
                    ring.release(number + j)

            cleans = self.cleans_tail(item, wg)
            if not spec.quantized:
                pl.when(self.has_tail(item) & jnp.logical_not(cleans))(
                    lambda: plgpu.barrier_arrive(self.tail_clean(item, s))
                )
            plgpu.barrier_wait(s["queries"].at[wg])
            lax.fori_loop(item.low, low, skip, None)

            key_scale = value_scale = None
            if spec.scales == "static" and scale_ref is not None:
                key_scale = scale_ref[layer_ref[0] * 2 * spec.num_kv_heads + item.kv_head]
                value_scale = scale_ref[(layer_ref[0] * 2 + 1) * spec.num_kv_heads + item.kv_head]

            def softmax(
                dots: Array, j: Array, top: Array, total: Array, masked: bool
            ) -> tuple[Array, Array, Array, Array]:
                """(top, total, weights, factor by which earlier results shrink)."""
                scores, factor = scaled_dots(spec, dots, key_scale)
                if masked:
                    token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=WGMMA) & (shape.span - 1)
                    # Read, not made by an iota: that would be hoisted out of the loops and fill registers there.
                    column = plgpu.load(columns, layout=WGMMA.reduce(0), optimized=False)
                    behind = (position - j * N) + token - lax.broadcast_in_dim(column, scores.shape, [1])
                    seen = behind >= 0
                    if spec.sliding_window is not None:
                        seen &= behind < spec.sliding_window
                    scores = jnp.where(seen, scores, -jnp.inf)
                new_top = jnp.maximum(top, scores.max(axis=1) * factor)
                shrink = jnp.exp2(top - new_top)
                weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
                return new_top, total * shrink + weights.sum(axis=1), weights, shrink

            def start_keys(out: Ref, j: Array) -> None:
                # The index is wg, but not to the compiler, which would keep all descriptors of the queries in registers.
                queries = (
                    s["q_smem"].at[wg + jnp.where(j < item.high, 0, 1)] if spec.head_dim == 256 else s["q_smem"].at[wg]
                )
                plgpu.wgmma(out, queries, key_ring.wait(number + j).transpose((1, 0)))

            # Two accumulators at head_dim 256: with four warpgroups one `wgmma` may not name more than 128 registers.
            part = min(spec.head_dim, 128)
            accumulators = [plgpu.WGMMAAccumulatorRef((ROWS, part), jnp.float32)] * (spec.head_dim // part)

            def add_values(acc_refs: Sequence[Ref], weights: Array, values: Ref) -> None:
                for i, ref in enumerate(acc_refs):
                    plgpu.wgmma(ref, weights, values.at[:, pl.ds(i * part, part)])

            @pl.when(tokens > 0)
            def _attend() -> None:
                if sink_ref is None:
                    top = plgpu.layout_cast(jnp.full((ROWS,), NO_LOGIT, jnp.float32), ROW)
                    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
                else:
                    top = self.sinks(sink_ref, item.head)
                    total = plgpu.layout_cast(jnp.ones((ROWS,), jnp.float32), ROW)

                def first(dots_ref: Ref) -> Array:
                    start_keys(dots_ref, low)
                    return dots_ref[...]

                dots = pl.run_scoped(first, plgpu.WGMMAAccumulatorRef((ROWS, N), jnp.float32))
                key_ring.release(number + low)
                top, total, weights, _ = softmax(dots, low, top, total, masked=True)
                weights = weights.astype(spec.compute_dtype)
                acc = [plgpu.layout_cast(jnp.zeros((ROWS, part), jnp.float32), WGMMA)] * (spec.head_dim // part)

                def step(j: Array, carry: tuple[Any, ...], masked: bool) -> tuple[Any, ...]:
                    acc, top, total, weights = carry

                    def overlapped(dots_ref: Ref, *acc_refs: Ref) -> tuple[Any, ...]:
                        for ref, value in zip(acc_refs, acc, strict=True):
                            ref[...] = value
                        start_keys(dots_ref, j)
                        add_values(acc_refs, weights, value_ring.wait(number + j - 1))
                        dots = plgpu.wgmma_accumulator_load(dots_ref, wait_n=len(acc_refs))
                        key_ring.release(number + j)
                        new_top, new_total, new_weights, shrink = softmax(dots, j, top, total, masked)
                        # The store is there for its place alone: without a side effect that needs the softmax, ptxas puts the wait
                        # for P V before the softmax, which is to run meanwhile. The barrier keeps the conversion after the wait:
                        # until then the registers that hold `weights` are being read.
                        plgpu.store(s["sums"].at[wg], new_total, optimized=False)
                        *gained, new_weights = lax.optimization_barrier((*(ref[...] for ref in acc_refs), new_weights))
                        value_ring.release(number + j - 1)
                        gained = [part * lax.broadcast_in_dim(shrink, part.shape, [0]) for part in gained]
                        return gained, new_top, new_total, new_weights.astype(spec.compute_dtype)

                    return pl.run_scoped(overlapped, plgpu.WGMMAAccumulatorRef((ROWS, N), jnp.float32), *accumulators)  # type: ignore[no-any-return]

                carry = (acc, top, total, weights)
                # Tiles [begin, end) are seen by every query of the warpgroup.
                begin = low + 1
                if spec.sliding_window is not None:
                    inside = lax.div(jnp.maximum(own_last - spec.sliding_window + N, 0), jnp.int32(N))
                    begin = jnp.clip(inside, low + 1, high)
                    carry = lax.fori_loop(low + 1, begin, lambda j, c: step(j, c, masked=True), carry)
                end = jnp.clip(lax.div(own_first + 1, jnp.int32(N)), begin, high)
                carry = lax.fori_loop(begin, end, lambda j, c: step(j, c, masked=False), carry)
                carry = lax.fori_loop(end, high, lambda j, c: step(j, c, masked=True), carry)
                acc, top, total, weights = carry
                plgpu.barrier_arrive(s["queries"].at[CONSUMERS + wg])

                values = value_ring.wait(number + high - 1)
                if not spec.quantized:
                    self.clean_tail(values, item, cleans, high, self.tail_clean(item, s))

                def last(*acc_refs: Ref) -> list[Array]:
                    for ref, value in zip(acc_refs, acc, strict=True):
                        ref[...] = value
                    add_values(acc_refs, weights, values)
                    return [ref[...] for ref in acc_refs]

                acc = pl.run_scoped(last, *accumulators)
                value_ring.release(number + high - 1)
                inverse = 1.0 / total if value_scale is None else value_scale / total
                out = [(x * lax.broadcast_in_dim(inverse, x.shape, [0])).astype(spec.compute_dtype) for x in acc]
                # Read again: what only the writing needs would otherwise sit in registers during the loops.
                self.write(out, out_ref, s["out_smem"].at[wg], self.item(tiles, index), wg)

            pl.when(tokens == 0)(lambda: plgpu.barrier_arrive(s["queries"].at[CONSUMERS + wg]))
            lax.fori_loop(high, item.high, skip, None)
            if not spec.quantized:
                waits = (high < item.high) | (tokens == 0)
                pl.when(self.has_tail(item) & waits)(lambda: plgpu.barrier_wait(self.tail_clean(item, s)))

        self.for_items(tiles, num_tiles, visit)
        self.zero_padding(out_ref, s["out_smem"].at[wg], num_tiles[1], wg)

    def has_tail(self, item: _Item) -> Array:
        """Whether the item's last tile holds keys beyond the sequence's end."""
        return item.high * self.tuning.keys > item.kv_len

    def cleans_tail(self, item: _Item, wg: Array) -> Array:
        """Whether the warpgroup has the item's last query, so that it surely reads the last tile."""
        return (item.tokens > wg * self.shape.span) & (item.tokens <= (wg + 1) * self.shape.span)

    def clean_tail(self, values: Ref, item: _Item, cleans: Array, high: Array, clean: Ref) -> None:
        """Zeroes the values beyond the sequence's end in the item's last tile: they may be NaN, and 0 * NaN is NaN.

        One warpgroup does it. The other arrived at the barrier when it began the item, and waits for it before it
        reads that tile, or at the item's end if it does not read it: either way both wait once.
        """
        tail = self.has_tail(item)

        @pl.when(tail & cleans)
        def _zero() -> None:
            for d in range(0, self.spec.head_dim, 64):
                part = values.at[:, pl.ds(d, 64)]
                layout = WGMMA
                loaded = plgpu.load(part, layout=layout)
                row = plgpu.broadcasted_iota(jnp.int32, loaded.shape, 0, layout=layout)
                part[...] = jnp.where(
                    row < item.kv_len - (item.high - 1) * self.tuning.keys, loaded, jnp.zeros_like(loaded)
                )
            plgpu.commit_smem()
            plgpu.barrier_arrive(clean)

        pl.when(tail & (high == item.high))(lambda: plgpu.barrier_wait(clean))

    def sinks(self, sink_ref: Ref, head: Array) -> Array:
        """The sink of each row's head, in base 2."""
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), 0, layout=WGMMA)
        out = jnp.zeros(row.shape, jnp.float32)
        for g in range(self.shape.heads):
            mine = (row >= g * self.shape.span) & (row < (g + 1) * self.shape.span)
            out = jnp.where(mine, lax.broadcast_in_dim(sink_ref[head + g], row.shape, []), out)
        return out.max(axis=1)

    def zero_padding(self, out_ref: Ref, staged: Ref, first: Array, wg: Array) -> None:
        """Zeroes the rows from `first` on, dealt out over the consumers of all blocks."""
        num_heads, columns = self.spec.num_kv_heads * self.spec.group, staged_columns(self.spec)
        together = max(n for n in range(1, ROWS + 1) if num_heads % n == 0)
        start = first + lax.axis_index("block") * CONSUMERS + wg
        step = self.tuning.num_blocks * CONSUMERS

        @pl.when(start < self.num_rows)
        def _zero() -> None:
            zeros = plgpu.layout_cast(jnp.zeros(staged.shape, staged.dtype), WGMMA)
            plgpu.store(staged, zeros, optimized=False)
            plgpu.commit_smem()

            @pl.loop(0, lax.div(self.num_rows - 1 - start, jnp.int32(step)) + 1)
            def _row(i: Array) -> None:
                for head in range(0, num_heads, together):
                    for d in range(0, self.spec.head_dim, columns):
                        target = out_ref.at[start + i * step, pl.ds(head, together), pl.ds(d, columns)]
                        plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, together)], target)

            plgpu.wait_smem_to_gmem(0)

    def write(self, out: list[Array], out_ref: Ref, staged: Ref, item: _Item, wg: Array) -> None:
        """Stores a warpgroup's rows: whole blocks of `span` tokens, or token by token where some belong to others."""
        span, columns, head = self.shape.span, staged_columns(self.spec), item.head
        row, _, first_valid, tokens = self.rows_of(item, wg)
        for d in range(0, self.spec.head_dim, columns):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = out[d // 128]
            plgpu.store(
                staged, part if columns == part.shape[1] else part[:, d % 128 : d % 128 + columns], optimized=False
            )
            plgpu.commit_smem()

            @pl.when(tokens == span)
            def _whole(d: int = d) -> None:
                for g in range(self.shape.heads):
                    target = out_ref.at[pl.ds(row, span), head + g, pl.ds(d, columns)]
                    plgpu.copy_smem_to_gmem(staged.at[pl.ds(g * span, span)], target)

            @pl.when(tokens < span)
            def _each(d: int = d) -> None:
                @pl.loop(first_valid, first_valid + tokens)
                def _token(i: Array) -> None:
                    for g in range(self.shape.heads):
                        target = out_ref.at[pl.ds(row + i, 1), head + g, pl.ds(d, columns)]
                        plgpu.copy_smem_to_gmem(staged.at[pl.ds(g * span + i, 1)], target)

        plgpu.wait_smem_to_gmem(0)
