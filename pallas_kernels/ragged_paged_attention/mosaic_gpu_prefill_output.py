"""How the Hopper prefill kernel stores its output: by TMA through shared memory, rows of padding as zeros."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.warpgroups import CONSUMERS, ROWS, WGMMA
from pallas_kernels.mosaic_gpu_store import store
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_call import Call, Item
from pallas_kernels.ragged_paged_attention.mosaic_gpu_prefill_plan import staged_columns


def write(call: Call, out: list[Array], item: Item, wg: Array) -> None:
    """Stores a warpgroup's rows: whole blocks of `span` tokens, or token by token where some belong to others."""
    span, columns = call.shape.span, staged_columns(call.spec)
    row, _, first_valid, tokens = call.rows_of(item, wg)
    staged = call.scratch["out_smem"].at[item.opaque(wg)]
    for d in range(0, call.spec.head_dim, columns):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part = out[d // 128]
        store(staged, part if columns == part.shape[1] else part[:, d % 128 : d % 128 + columns])
        plgpu.commit_smem()

        def copy(rows: int, token: Array, d: int = d) -> None:
            """`rows` tokens from `token` on, of each head."""

            # A real loop, whose bound the compiler cannot know: unrolled, its addresses would fill registers.
            @pl.loop(0, jnp.where(item.kv_len > 0, call.shape.heads, 0))
            def _head(g: Array) -> None:
                target = call.out.at[pl.ds(row + token, rows), item.head + g, pl.ds(d, columns)]
                plgpu.copy_smem_to_gmem(staged.at[pl.ds(g * span + token, rows)], target)

        pl.when(tokens == span)(lambda copy=copy: copy(span, jnp.int32(0)))
        pl.when(tokens < span)(
            lambda copy=copy: pl.loop(first_valid, first_valid + tokens)(lambda token: copy(1, token))
        )

    plgpu.wait_smem_to_gmem(0)


def zero_padding(call: Call, wg: Array) -> None:
    """Zeroes the rows from counts[1] on, dealt out over the consumers of all blocks."""
    num_heads, columns = call.spec.num_kv_heads * call.spec.group, staged_columns(call.spec)
    together = max(n for n in range(1, ROWS + 1) if num_heads % n == 0)
    staged = call.scratch["out_smem"].at[wg]
    start = call.counts[1] + lax.axis_index("block") * CONSUMERS + wg
    step = call.tuning.num_blocks * CONSUMERS

    @pl.when(start < call.num_rows)
    def _zero() -> None:
        zeros = plgpu.layout_cast(jnp.zeros(staged.shape, staged.dtype), WGMMA)
        store(staged, zeros)
        plgpu.commit_smem()

        @pl.loop(0, lax.div(call.num_rows - 1 - start, jnp.int32(step)) + 1)
        def _row(i: Array) -> None:
            for head in range(0, num_heads, together):
                for d in range(0, call.spec.head_dim, columns):
                    target = call.out.at[start + i * step, pl.ds(head, together), pl.ds(d, columns)]
                    plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, together)], target)

        plgpu.wait_smem_to_gmem(0)
