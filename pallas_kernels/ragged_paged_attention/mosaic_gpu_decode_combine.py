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

_Sums = tuple[Array, Array, Array]
"""Sums of weighted values [D, N], maximum in base 2 [N], sum of weights [N]."""


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

        def visit(step: Array, carry: _Sums) -> _Sums:
            # Several slots at once, so that their loads are in flight together.
            index = [step * unroll + j for j in range(unroll)]
            at = [jnp.minimum(first + i, slots - 1) for i in index]
            absent = [i >= count for i in index]
            tops = [_load(stat_ref.at[a, 0], WGMMA.reduce(0), no, NO_LOGIT) for a, no in zip(at, absent, strict=True)]
            sums = [_load(stat_ref.at[a, 1], WGMMA.reduce(0), no, 0.0) for a, no in zip(at, absent, strict=True)]
            accs = [_load(acc_ref.at[a], WGMMA, no, 0.0) for a, no in zip(at, absent, strict=True)]
            for part in zip(accs, tops, sums, strict=True):
                carry = _merge(carry, part)
            return carry

        if sinks is None:
            top = plgpu.layout_cast(jnp.full((N,), NO_LOGIT, jnp.float32), WGMMA.reduce(0))
            total = plgpu.layout_cast(jnp.zeros((N,), jnp.float32), WGMMA.reduce(0))
        else:
            head = lax.rem(unit, jnp.int32(spec.num_kv_heads))
            top = plgpu.load(rest[0].at[head], layout=WGMMA.reduce(0), optimized=False)
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


def _load(ref: Ref, layout: Any, absent: Array, instead: float) -> Array:
    loaded = plgpu.load(ref, layout=layout, optimized=False)
    return choose(absent, jnp.full_like(loaded, instead), loaded)


def _merge(sums: _Sums, more: _Sums) -> _Sums:
    """Two partial results as one."""
    (out, top, total), (more_out, more_top, more_total) = sums, more
    new_top = jnp.maximum(top, more_top)
    old, new = jnp.exp2(top - new_top), jnp.exp2(more_top - new_top)
    total = total * old + more_total * new
    out = out * lax.broadcast_in_dim(old, out.shape, [1]) + more_out * lax.broadcast_in_dim(new, out.shape, [1])
    return out, new_top, total
