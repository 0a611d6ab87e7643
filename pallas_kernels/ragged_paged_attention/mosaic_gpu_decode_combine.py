"""The second half of split-key decoding on Hopper: merges the partial results that several blocks wrote for one
query."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper.memory import Ref
from pallas_kernels.hopper.softmax import NO_LOGIT, choose
from pallas_kernels.hopper.warpgroups import WGMMA
from pallas_kernels.mosaic_gpu_store import store
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import CallSpec
from pallas_kernels.scoring import LOG2E


def combine(
    acc: Float[Array, "slots D N"],
    stats: Float[Array, "slots 2 N"],
    unit_slots: Int[Array, "units 2"],
    sinks: Float[Array, " H"] | None,
    spec: CallSpec,
) -> Float[Array, "S K D N"]:
    """Merges the partial results of each unit (a sequence and a KV head)."""
    (slots, D, N), units = acc.shape, unit_slots.shape[0]
    unroll = max(1, 4096 // (D * N))
    inputs = [acc, stats, unit_slots]
    if sinks is not None:
        grouped = sinks.astype(jnp.float32).reshape(spec.num_kv_heads, spec.group) * LOG2E
        inputs.append(jnp.pad(grouped, ((0, 0), (0, N - spec.group))))

    def body(*refs: Ref) -> None:
        acc_ref, stat_ref, slots_ref, *rest, out_ref = refs
        unit = lax.axis_index("unit")
        first, count = slots_ref[unit, 0], slots_ref[unit, 1]

        def load(ref: Ref, layout: Any) -> Array:
            return plgpu.load(ref, layout=layout, optimized=False)

        def masked(i: Array, ref: Ref, layout: Any, absent: float) -> Array:
            loaded = load(ref, layout)
            return choose(i >= count, jnp.full_like(loaded, absent), loaded)

        def visit(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            # Several slots at once, so that their loads are in flight together.
            index = [step * unroll + j for j in range(unroll)]
            at = [jnp.minimum(first + i, slots - 1) for i in index]
            tops = [masked(i, stat_ref.at[a, 0], WGMMA.reduce(0), NO_LOGIT) for i, a in zip(index, at, strict=True)]
            sums = [masked(i, stat_ref.at[a, 1], WGMMA.reduce(0), 0.0) for i, a in zip(index, at, strict=True)]
            accs = [masked(i, acc_ref.at[a], WGMMA, 0.0) for i, a in zip(index, at, strict=True)]
            out, top, total = carry
            for next_acc, next_top, next_sum in zip(accs, tops, sums, strict=True):
                new_top = jnp.maximum(top, next_top)
                old, new = jnp.exp2(top - new_top), jnp.exp2(next_top - new_top)
                total = total * old + next_sum * new
                out = out * lax.broadcast_in_dim(old, out.shape, [1]) + next_acc * lax.broadcast_in_dim(
                    new, out.shape, [1]
                )
                top = new_top
            return out, top, total

        if sinks is None:
            top = plgpu.layout_cast(jnp.full((N,), NO_LOGIT, jnp.float32), WGMMA.reduce(0))
            total = plgpu.layout_cast(jnp.zeros((N,), jnp.float32), WGMMA.reduce(0))
        else:
            top = load(rest[0].at[lax.rem(unit, jnp.int32(spec.num_kv_heads))], WGMMA.reduce(0))
            total = plgpu.layout_cast(jnp.ones((N,), jnp.float32), WGMMA.reduce(0))
        out = plgpu.layout_cast(jnp.zeros((D, N), jnp.float32), WGMMA)
        steps = lax.div(count + unroll - 1, jnp.int32(unroll))
        out, _, total = lax.fori_loop(0, steps, visit, (out, top, total))
        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
        store(out_ref.at[unit], out * lax.broadcast_in_dim(inverse, out.shape, [1]))

    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((units, D, N), jnp.float32),
        grid=(units,),
        grid_names=("unit",),
        num_threads=1,
        thread_name="wg",
        kernel_name="paged_decode_combine",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs)
    combined: Array = out.reshape(-1, spec.num_kv_heads, D, N)
    return combined
