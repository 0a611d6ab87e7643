"""Per-slot data that lives on the device: what the sampler needs to know of each running sequence.

A slot is seated when a sequence starts to run (or resumes after preemption) and is then kept up to date by the step
itself, so that a step can be dispatched before the host has read the one before. Slot `max_num_seqs` is the
padding slot, which nobody reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from jaxkv.core.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from jaxkv.runtime.arrays import HostOrDevice

HISTORY_CHUNK = 1024
"""Tokens of history that one call of `add_history` takes (a static shape)."""
_SMALLEST, _LARGEST = 1e-30, 1e30
"""A repetition penalty beyond these, or a hotter temperature, would overflow float32 when it meets a logit."""


@struct.dataclass
class SlotState:
    """Arrays over N slots. `prompt_seen`, and the counts of output before the seating, are filled only where penalties use them."""

    last_token: HostOrDevice  # [N] int32, the newest token: known here before the host has read it
    output_len: HostOrDevice  # [N] int32, tokens generated so far: the position that the RNG key folds in
    seed: HostOrDevice  # [N, 2] uint32, key data
    temperature: HostOrDevice  # [N] float32, 0 = greedy
    top_p: HostOrDevice  # [N] float32
    min_p: HostOrDevice  # [N] float32
    top_k: HostOrDevice  # [N] int32, V = off
    presence: HostOrDevice  # [N] float32
    frequency: HostOrDevice  # [N] float32
    repetition: HostOrDevice  # [N] float32
    min_tokens: HostOrDevice  # [N] int32
    max_tokens: HostOrDevice  # [N] int32
    stop_ids: HostOrDevice  # [N, MAX_STOP_TOKEN_IDS] int32, -1 = empty
    bias_ids: HostOrDevice  # [N, MAX_LOGIT_BIAS] int32, V = empty
    bias: HostOrDevice  # [N, MAX_LOGIT_BIAS] float32
    output_counts: HostOrDevice  # [N, V] int32
    prompt_seen: HostOrDevice  # [N, V] bool


def empty_state(num_slots: int, vocab_size: int) -> SlotState:
    """A state whose slots are all greedy and unbounded; host arrays."""
    N, V = num_slots, vocab_size
    row = slot_row(SamplingParams(temperature=0.0, max_tokens=1), (), 0, [0], [], V)
    rows = {name: np.broadcast_to(value, (N, *np.shape(value))).copy() for name, value in row.items()}
    return SlotState(
        output_counts=np.zeros((N, V), np.int32),
        prompt_seen=np.zeros((N, V), np.bool_),
        **rows,
    )


def slot_row(
    params: SamplingParams, stop_ids: Seq[int], seed: int, prompt: Seq[int], output: Seq[int], vocab_size: int
) -> dict[str, np.ndarray]:
    """The host values of one slot for `seat`. stop_ids: all ids that end the sequence; params.max_tokens is a number by now."""
    stops = np.full(MAX_STOP_TOKEN_IDS, -1, np.int32)
    stops[: len(stop_ids)] = list(stop_ids)
    bias_ids = np.full(MAX_LOGIT_BIAS, vocab_size, np.int32)
    bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
    bias_ids[: len(params.logit_bias)] = list(params.logit_bias)
    bias[: len(params.logit_bias)] = list(params.logit_bias.values())
    floats = {
        "temperature": min(params.temperature, _LARGEST),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "repetition": min(max(params.repetition_penalty, _SMALLEST), _LARGEST),
    }
    ints = {
        "last_token": output[-1] if output else prompt[-1],
        "output_len": len(output),
        "top_k": params.top_k if 0 < params.top_k < vocab_size else vocab_size,
        "min_tokens": params.min_tokens,
        "max_tokens": params.max_tokens,
    }
    return {
        **{name: np.asarray(value, np.float32) for name, value in floats.items()},
        **{name: np.asarray(value, np.int32) for name, value in ints.items()},
        "seed": np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32),
        "stop_ids": stops,
        "bias_ids": bias_ids,
        "bias": bias,
    }


def seat(state: SlotState, slot: Int[Array, ""], row: dict[str, Array]) -> SlotState:
    """Fills a slot for a new sequence and forgets the one before."""
    filled = {name: getattr(state, name).at[slot].set(value) for name, value in row.items()}
    return dataclasses.replace(
        state,
        **filled,
        output_counts=state.output_counts.at[slot].set(0),
        prompt_seen=state.prompt_seen.at[slot].set(False),
    )


def add_history(
    state: SlotState, slot: Int[Array, ""], prompt: Int[Array, " C"], output: Int[Array, " C"]
) -> SlotState:
    """Marks prompt tokens as seen and counts output tokens; entries outside the vocabulary are padding."""
    return dataclasses.replace(
        state,
        prompt_seen=state.prompt_seen.at[slot, prompt].set(True, mode="drop"),
        output_counts=state.output_counts.at[slot, output].add(1, mode="drop"),
    )


def history_chunks(prompt: Seq[int], output: Seq[int], vocab_size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cuts a sequence's history into the static chunks that `add_history` takes."""

    def chunk(ids: Seq[int], start: int) -> np.ndarray:
        padded = np.full(HISTORY_CHUNK, vocab_size, np.int32)
        piece = ids[start : start + HISTORY_CHUNK]
        padded[: len(piece)] = piece
        return padded

    return [
        (chunk(prompt, start), chunk(output, start)) for start in range(0, max(len(prompt), len(output)), HISTORY_CHUNK)
    ]


def uses_history(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def initial_state(sharding: jax.sharding.Sharding, num_slots: int, vocab_size: int) -> SlotState:
    """`empty_state` on the devices."""
    state: SlotState = jax.device_put(jax.tree.map(jnp.asarray, empty_state(num_slots, vocab_size)), sharding)
    return state
