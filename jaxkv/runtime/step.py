"""THE step: forward, sampling and stop checks of one batch in one jitted function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache.pool import KVPool, pool_shardings, pool_specs
from jaxkv.models import decoder
from jaxkv.models.config import ModelConfig
from jaxkv.models.params import Params
from jaxkv.runtime.logprobs import Logprobs, prompt_logprobs, sampled_logprobs
from jaxkv.runtime.mesh import logit_sharding, param_shardings, replicated
from jaxkv.runtime.packing import packed_shardings
from jaxkv.runtime.sampler import sample
from jaxkv.runtime.slot_state import SlotState
from jaxkv.runtime.step_batch import StepBatch
from pallas_kernels.backends import Backend
from pallas_kernels.dense_matmul import api as dense_matmul
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention


@struct.dataclass
class StepOutput:
    """What the host reads of a step. Those of padding mean nothing, nor, but for `broken`, those of sequences that do not sample."""

    tokens: jax.Array  # [S] int32
    broken: jax.Array  # [S] bool: the chunk or its logits hold NaN, or no logit is finite
    finished: jax.Array  # [S] bool: the token is a stop id (past min_tokens) or reaches max_tokens
    logprobs: Logprobs  # [S]
    prompt_logprobs: Logprobs  # [T]


@dataclass(frozen=True, slots=True)
class StepSpec:
    """The static arguments of a step.

    backend: of attention and the KV cache. matmul_backend: of the layers' matmuls and the output table. dtype: of activations.
    quantized: the parameter tree holds QuantizedWeights. packed: those of the layers are PackedWeights.
    """

    model: ModelConfig
    layout: KVLayout
    mesh: Mesh
    backend: Backend
    dtype: str
    quantized: bool = False
    matmul_backend: dense_matmul.Backend = "reference"
    packed: bool = False


StepFn = Callable[[Params, KVPool, SlotState, StepBatch], tuple[KVPool, SlotState, StepOutput]]


def make_step(spec: StepSpec) -> StepFn:
    """Jits the step for a mesh; pool and state are donated, and come back where they were."""
    pool, everywhere = pool_shardings(spec.mesh, spec.layout), replicated(spec.mesh)
    params = param_shardings(spec.mesh, spec.model, quantized=spec.quantized)
    if spec.packed:
        params = packed_shardings(spec.mesh, spec.model, params)
    return jax.jit(
        lambda params, pool, state, batch: _step(spec, params, pool, state, batch),
        donate_argnums=(1, 2),
        in_shardings=(params, pool, everywhere, everywhere),
        out_shardings=(pool, everywhere, everywhere),
    )


def _step(
    spec: StepSpec, params: Params, pool: KVPool, state: SlotState, batch: StepBatch
) -> tuple[KVPool, SlotState, StepOutput]:
    known = state.last_token[batch.slots[batch.token_seqs]]
    tokens = jnp.where(batch.tokens < 0, known, batch.tokens)
    pool, hidden = decoder.forward(
        spec.model,
        params,
        pool,
        tokens,
        batch.positions,
        _attention(spec, batch),
        dtype=spec.dtype,
        backend=spec.matmul_backend,
        rows=batch.cu_q_lens[-1],
    )

    def to_logits(hidden: Float[Array, "R E"], rows: Int[Array, ""] | None = None) -> Float[Array, "R V"]:
        # First as the table lies: asked for the whole logits only, the partitioner may gather the table instead.
        parts = decoder.logits(params, hidden, backend=spec.matmul_backend, rows=rows)
        parts = jax.lax.with_sharding_constraint(parts, logit_sharding(spec.mesh, spec.model))
        gathered: Array = jax.lax.with_sharding_constraint(parts, replicated(spec.mesh))
        return gathered

    last_rows = jnp.maximum(batch.cu_q_lens[1:] - 1, 0)
    logits = to_logits(hidden[last_rows], batch.num_seqs)
    sampled = sample(logits, state, batch.slots, batch.flags)
    output = StepOutput(
        tokens=sampled,
        broken=broken_rows(logits) | _broken_chunks(hidden, batch.cu_q_lens),
        finished=_finished(state, batch.slots, sampled),
        logprobs=sampled_logprobs(batch.flags.logprobs, logits, sampled),
        prompt_logprobs=prompt_logprobs(batch.flags.prompt_logprobs, hidden, batch.targets, to_logits),
    )
    return pool, _advance(state, batch, sampled), output


def broken_rows(logits: Float[Array, "S V"]) -> Bool[Array, " S"]:
    """Rows with NaN, or without a finite maximum. The sum shows NaN: XLA's CPU backend loses it in a maximum."""
    broken: Array = jnp.isnan(jnp.sum(logits, axis=-1)) | ~jnp.isfinite(jnp.max(logits, axis=-1))
    return broken


def _broken_chunks(hidden: Float[Array, "T E"], cu_q_lens: Int[Array, " S+1"]) -> Bool[Array, " S"]:
    """Chunks with NaN in a token's hidden state: a later chunk need not show what is wrong with an earlier one."""
    count = jnp.cumsum(jnp.isnan(jnp.sum(hidden.astype(jnp.float32), axis=-1)))
    before = jnp.concatenate([jnp.zeros(1, count.dtype), count])
    broken: Array = before[cu_q_lens[1:]] > before[cu_q_lens[:-1]]
    return broken


def _finished(state: SlotState, slots: Int[Array, " S"], sampled: Int[Array, " S"]) -> Bool[Array, " S"]:
    length = state.output_len[slots] + 1
    stopped = jnp.any(state.stop_ids[slots] == sampled[:, None], axis=1) & (length > state.min_tokens[slots])
    finished: Array = stopped | (length >= state.max_tokens[slots])
    return finished


def _advance(state: SlotState, batch: StepBatch, sampled: Int[Array, " S"]) -> SlotState:
    """Records the sampled tokens in their slots; the others go to the padding slot."""
    padding_slot = state.last_token.shape[0] - 1
    slots = jnp.where(batch.samples, batch.slots, padding_slot)
    return dataclasses.replace(
        state,
        last_token=state.last_token.at[slots].set(sampled),
        output_len=state.output_len.at[slots].add(1),
        output_counts=state.output_counts.at[slots, sampled].add(1),
    )


def _attention(spec: StepSpec, batch: StepBatch) -> decoder.Attend[KVPool]:
    """Writes the new keys and values and attends, each device on its own KV heads."""
    heads = PartitionSpec(None, "tensor")
    pages = pool_specs(spec.layout)
    scale = spec.model.head_dim**-0.5
    heads_here = spec.layout.num_kv_heads // spec.mesh.shape["tensor"]
    layout = dataclasses.replace(spec.layout, num_kv_heads=heads_here, shards=1)

    def local(
        kv: KVPages, layer: Array, q: Array, k: Array, v: Array, batch: StepBatch
    ) -> tuple[KVPages, Float[Array, "T K G D"]]:
        T, K, G, D = q.shape
        kv = write_kv(kv, layer, k, v, batch.write_pages, batch.write_offsets, layout=layout, backend=spec.backend)
        out = ragged_paged_attention(
            q.reshape(T, K * G, D),
            kv,
            layer,
            batch.page_table,
            batch.cu_q_lens,
            batch.kv_lens,
            batch.num_seqs,
            layout=layout,
            scale=scale,
            sliding_window=spec.model.sliding_window,
            backend=spec.backend,
        )
        out = out.reshape(T, K, G, D)
        if layout.scales == "static":
            # Such a pool holds neither NaN nor infinity. They show in the result of the token that brings them.
            hidden_by_pool = 0.0 * (k + v).astype(jnp.float32).sum(axis=-1)
            out = out + hidden_by_pool[:, :, None, None].astype(out.dtype)
        return kv, out

    mapped = jax.shard_map(
        local,
        mesh=spec.mesh,
        in_specs=(pages, PartitionSpec(), heads, heads, heads, PartitionSpec()),
        out_specs=(pages, heads),
        check_vma=False,
    )

    def attend(pool: KVPool, layer: Array, q: Array, k: Array, v: Array) -> tuple[KVPool, Array]:
        (group,) = pool
        group, out = mapped(group, layer, q, k, v, batch)
        return (group,), out

    return attend
