"""Dense attention on Hopper (sm_90a): a warp-specialized kernel on FlashAttention-3's schedule (Shah et al. 2024).

A thread block owns 128 rows of queries of one head: two warpgroups multiply 64 of them each on `wgmma`, a third one brings queries,
keys and values by TMA, the latter two into a ring of tiles in shared memory. While the softmax of tile j runs, P V of tile j - 1 is
in the tensor cores; Q K^T of tile j was issued just before it. Tiles that no query of a warpgroup sees are not multiplied, tiles
that all see fully are not masked. Blocks with the most tiles come first.

A row is a token of one query head; with few tokens, where that would leave most rows empty, the query heads of a KV head are rows
of one block together (row = token * pack + head).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.flash_attention.mosaic_gpu_call import Call, Kernel
from pallas_kernels.flash_attention.mosaic_gpu_consume import consume
from pallas_kernels.flash_attention.mosaic_gpu_produce import produce
from pallas_kernels.flash_attention.tuning import Tiles
from pallas_kernels.hopper.memory import Ref, tiled
from pallas_kernels.hopper.warpgroups import CONSUMERS, ROWS, in_roles
from pallas_kernels.scoring import LOG2E, Scoring

KERNEL_NAME = "flash_attention"
DTYPES = ("bfloat16", "float16")
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
    out = _call(kernel, inputs)[:, : Tq * pack]
    if pack > 1:
        out = out.reshape(B, Tq, pack, K, D).transpose(0, 1, 3, 2, 4)
    return out.reshape(q.shape)


def make_kernel(q_shape: tuple[int, ...], k_shape: tuple[int, ...], scoring: Scoring, tiles: Tiles) -> Kernel:
    """The kernel for queries and keys of these shapes."""
    (B, Tq, H, D), (Tk, K) = q_shape, k_shape[1:3]
    pack = H // K if Tq < CONSUMERS * ROWS else 1
    num_tiles = -(-Tq * pack // (CONSUMERS * ROWS))
    return Kernel(scoring, tiles, B, pack, H // pack, H // pack // K, D, num_tiles, Tk + -Tk % _ALIGNED)


def _call(kernel: Kernel, inputs: list[Array]) -> Array:
    def body(q: Ref, k: Ref, v: Ref, lens: Ref, /, *refs: Ref, **scratch: Ref) -> None:
        *sinks, out = refs
        call = Call(kernel, q, k, v, lens, sinks[0] if sinks else None, out, scratch)
        wg = lax.axis_index("wg")
        in_roles(wg, kernel.tiles.registers, lambda: consume(call, wg), lambda: produce(call))

    rows = inputs[0]
    return plgpu.kernel(  # type: ignore[no-any-return]
        body,
        out_type=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        grid=(kernel.num_tiles * kernel.batches * kernel.heads,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name=KERNEL_NAME,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=_scratch(kernel, rows.dtype),
    )(*inputs)


def _scratch(kernel: Kernel, dtype: Any) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    D, keys, stages = kernel.head_dim, kernel.tiles.keys, kernel.tiles.stages
    return {
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
    }
