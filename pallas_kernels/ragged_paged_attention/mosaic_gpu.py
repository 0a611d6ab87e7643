"""Ragged paged attention on NVIDIA Hopper (sm_90a), through Pallas' Mosaic GPU backend.

Sequences with one query go to the decode kernel (split over keys), all others to the prefill kernel
(warp-specialized); which is which is decided on the device, so that a step may mix them freely. A batch of decodes
costs the bytes of its keys and values, and the launch of a prefill kernel that finds no work and reads no page. A caller whose
batch cannot hold anything but decodes says `decode_only`, which saves the launch too; one row is such a batch.

8-bit keys are multiplied as 16-bit numbers, not by the FP8 form of `wgmma`: that takes queries in FP8 as well, and rounding those to
e4m3, with a scale for each row, changes each number by up to 2^-4 of it and the output by 3.4 % (relative norm, against the float64
oracle on random batches), where the kernels keep to 1 %.

Reads head_major pools of bfloat16, float16, int8 and both fp8 types, head_dim 64, 128 and 256, pages of 16, 32 or 64
tokens or a multiple of 128. The kernels need `wgmma`: other chips use the `reference` backend (on Ampere with an int8
pool rather than fp8, which is emulated there; Blackwell has no `wgmma`).
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention import mosaic_gpu_decode as decode_kernel
from pallas_kernels.ragged_paged_attention import mosaic_gpu_prefill as prefill_kernel
from pallas_kernels.ragged_paged_attention import mosaic_gpu_prefill_plan as prefill_plan
from pallas_kernels.ragged_paged_attention.mosaic_gpu_common import KEY_TILE, KV_DTYPES, CallSpec
from pallas_kernels.ragged_paged_attention.mosaic_gpu_decode_call import DecodeTuning
from pallas_kernels.ragged_paged_attention.tuning import gpu_numbers


def check_supported(layout: KVLayout, *, num_heads: int) -> None:
    """Raises ValueError that names what these kernels cannot do for this pool. Called when an engine is built."""
    if layout.order != "head_major":
        raise ValueError(f"attention backend 'mosaic_gpu' reads head_major pools, not {layout.order}")
    if layout.dtype not in KV_DTYPES:
        raise ValueError(f"attention backend 'mosaic_gpu' reads pools of {', '.join(KV_DTYPES)}, not {layout.dtype}")
    if layout.head_dim not in (64, 128, 256):
        raise ValueError(f"attention backend 'mosaic_gpu' takes head_dim 64, 128 or 256, not {layout.head_dim}")
    if layout.page_size not in (16, 32, 64) and layout.page_size % 128:
        raise ValueError(
            f"attention backend 'mosaic_gpu' takes pages of 16, 32 or 64 tokens or a multiple of 128, "
            f"not {layout.page_size}"
        )
    if num_heads % layout.num_kv_heads or num_heads // layout.num_kv_heads > 16:
        raise ValueError(
            f"attention backend 'mosaic_gpu' takes 1 to 16 query heads per KV head, "
            f"not {num_heads} over {layout.num_kv_heads}"
        )


def decode_tuning(spec: CallSpec, num_sms: int | None = None) -> DecodeTuning:
    """Two blocks on an SM, which hide each other's softmax, if each then has two stages at least, else one; as many stages as fit."""
    numbers = gpu_numbers()
    for blocks_per_sm in (2, 1):
        room = numbers.shared_bytes // blocks_per_sm - numbers.reserved_bytes
        for stages in range(numbers.decode_stages, 1, -1):
            tuning = DecodeTuning(blocks_per_sm * (num_sms or numbers.sms), stages)
            if decode_kernel.shared_bytes(spec, tuning) <= room:
                return tuning
    raise ValueError(f"no decode tile fits into {numbers.shared_bytes} bytes of shared memory for {spec}")


def prefill_tuning(spec: CallSpec, num_sms: int | None = None) -> prefill_plan.PrefillTuning:
    """The table's numbers for this kind of call; one block on an SM."""
    numbers = gpu_numbers()
    plain = spec.sliding_window is None and spec.soft_cap is None and not spec.has_sinks
    kind = "quantized" if spec.quantized else "plain" if plain else "any"
    chosen = numbers.prefill[kind][str(spec.head_dim)]
    return prefill_plan.PrefillTuning(
        num_sms or numbers.sms,
        keys=chosen["keys"],
        stages=chosen["stages"],
        converted=chosen.get("converted", 0),
        registers=tuple(chosen["registers"]),
    )


def call_spec(
    layout: KVLayout,
    *,
    num_heads: int,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    has_sinks: bool = False,
) -> CallSpec:
    """The static description of a call for this pool."""
    return CallSpec(
        num_kv_heads=layout.num_kv_heads,
        group=num_heads // layout.num_kv_heads,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        kv_dtype=layout.dtype,
        scales=layout.scales,
        softmax_scale=scale,
        sliding_window=sliding_window,
        soft_cap=logit_soft_cap,
        has_sinks=has_sinks,
    )


def attend(
    q: Float[Array, "T H D"],
    kv: KVPages,
    layer: Int[Array, ""],
    page_table: Int[Array, "S W"],
    cu_q_lens: Int[Array, " S+1"],
    kv_lens: Int[Array, " S"],
    num_seqs: Int[Array, ""],
    *,
    spec: CallSpec,
    sinks: Float[Array, " H"] | None = None,
    decode_only: bool = False,
    num_sms: int | None = None,
) -> Float[Array, "T H D"]:
    """Contract: `pallas_kernels.ragged_paged_attention.api`. decode_only: no sequence has more than one query.
    num_sms: instead of the chip's own."""
    T, S = q.shape[0], page_table.shape[0]
    num_seqs = jnp.asarray(num_seqs, jnp.int32).reshape(())
    q_lens = jnp.where(jnp.arange(S) < num_seqs, jnp.diff(cu_q_lens), 0)
    decoded, rows = decode_kernel.decode(
        q,
        kv.pages,
        kv.scales,
        layer,
        page_table,
        cu_q_lens[:-1],
        jnp.where(q_lens == 1, kv_lens, 0),
        sinks,
        spec=spec,
        tuning=decode_tuning(spec, num_sms),
    )
    if decode_only or T == 1:
        return jnp.zeros_like(q).at[rows].set(decoded.astype(q.dtype), mode="drop")

    tuning = prefill_tuning(spec, num_sms)
    span = prefill_plan.Shape.of(spec).span
    queries = jnp.pad(q, ((0, max(span - T, 0)), (0, 0), (0, 0))).astype(spec.compute_dtype)
    tiles, num_tiles = prefill_plan.plan(spec, tuning, T, cu_q_lens, jnp.where(q_lens > 1, q_lens, 0), kv_lens)
    counts = jnp.stack([num_tiles, cu_q_lens[num_seqs]]).astype(jnp.int32)
    out = prefill_kernel.prefill(
        queries, kv.pages, kv.scales, layer, page_table, tiles, counts, sinks, spec=spec, tuning=tuning
    )
    return out[:T].astype(q.dtype).at[rows].set(decoded.astype(q.dtype), mode="drop")


__all__ = ["KEY_TILE", "attend", "call_spec", "check_supported", "decode_tuning", "prefill_tuning"]
