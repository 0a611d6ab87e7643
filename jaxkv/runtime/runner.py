"""Owns what lives on the devices (weights, pool, slot state) and runs steps on it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxkv.cache.pool import KVPool, create_pool
from jaxkv.core.sampling_params import SamplingParams
from jaxkv.models.params import Params
from jaxkv.runtime import slot_state
from jaxkv.runtime.compile_guard import CompileGuard
from jaxkv.runtime.mesh import replicated
from jaxkv.runtime.page_copy import PAIRS, make_page_copy, padded_pairs
from jaxkv.runtime.sampler import SamplingFlags
from jaxkv.runtime.step import StepOutput, StepSpec, make_step
from jaxkv.runtime.step_batch import Buckets, Chunk, build_batch, empty_batch, no_flags
from pallas_kernels.kv_layout import read_pages

log = logging.getLogger("jaxkv")


class Runner:
    """The device side of an engine. One thread at a time may call it.

    params: placed on the mesh already. num_blocks: pages of the pool, the trash page not counted.
    static_scales: [L, 2, K] of a pool that has them.
    """

    def __init__(
        self,
        spec: StepSpec,
        params: Params,
        buckets: Buckets,
        num_blocks: int,
        static_scales: Float[np.ndarray, "L 2 K"] | None = None,
    ) -> None:
        self.spec = spec
        self.buckets = buckets
        self.num_blocks = num_blocks
        self._params = params
        self._static_scales = static_scales
        everywhere = replicated(spec.mesh)
        self.pool = self._new_pool()
        self._state = self._new_state()
        self._step = make_step(spec)
        self._copy = make_page_copy(spec)
        placed: dict[str, Any] = {"in_shardings": everywhere, "out_shardings": everywhere, "donate_argnums": 0}
        self._seat = jax.jit(slot_state.seat, **placed)
        self._add_history = jax.jit(slot_state.add_history, **placed)
        self._guard = CompileGuard()
        self._warm_compilations = 0

    @property
    def recompilations(self) -> int:
        """Compilations since the end of the warm-up."""
        return self._guard.compilations - self._warm_compilations

    def warm_up(self) -> None:
        """Compiles everything that serving calls, by running it on padding."""
        started = time.monotonic()
        padding_slot = self.buckets.max_num_seqs
        shapes = self.buckets.shapes()
        log.info("warm-up: compiling %d step shapes (slow at the first start; compiled steps are cached)", len(shapes))
        with self._guard.watch():
            self.seat(
                padding_slot, SamplingParams(temperature=0.0, max_tokens=1, presence_penalty=1.0), (), 0, [0], [0]
            )
            self._copy_pairs([])
            for done, (T, W) in enumerate(shapes, start=1):
                S = self.buckets.sequences(T)
                batch = empty_batch(T, W, S, no_flags(), trash_page=self.num_blocks, padding_slot=padding_slot)
                self.pool, self._state, output = self._step(self._params, self.pool, self._state, batch)
                jax.block_until_ready(output)
                log.info("warm-up: %d of %d shapes ready after %.1f s", done, len(shapes), time.monotonic() - started)
        self._warm_compilations = self._guard.compilations

    def seat(
        self, slot: int, params: SamplingParams, stop_ids: Seq[int], seed: int, prompt: Seq[int], output: Seq[int]
    ) -> None:
        """Gives a slot to a sequence that starts, or resumes with `output` generated before."""
        V = self.spec.model.vocab_size
        row = slot_state.slot_row(params, stop_ids, seed, prompt, output, V)
        with self._guard.watch():
            self._state = self._seat(self._state, np.int32(slot), row)
            if slot_state.uses_history(params):
                for prompt_ids, output_ids in slot_state.history_chunks(prompt, output, V):
                    self._state = self._add_history(self._state, np.int32(slot), prompt_ids, output_ids)

    def copy_blocks(self, pairs: Seq[tuple[int, int]]) -> None:
        """Copies blocks, each pair a source and a target, with their scales; no target may be a source or occur twice."""
        with self._guard.watch():
            for some in itertools.batched(pairs, PAIRS):
                self._copy_pairs(list(some))

    def _copy_pairs(self, pairs: list[tuple[int, int]]) -> None:
        self.pool = self._copy(self.pool, *padded_pairs(pairs, self.num_blocks))

    def run(self, chunks: Seq[Chunk], flags: SamplingFlags) -> StepOutput:
        """Dispatches one step; the output is still on its way when this returns."""
        batch = build_batch(
            chunks, flags, self.buckets, page_size=self.spec.layout.page_size, trash_page=self.num_blocks
        )
        with self._guard.watch():
            self.pool, self._state, output = self._step(self._params, self.pool, self._state, batch)
        return output

    def restore(self) -> bool:
        """After a failed step: makes pool and state anew if the step took them with it. True when their content is lost."""
        lost = not self._intact()
        if lost:
            self.pool = self._new_pool()
            self._state = self._new_state()
        return lost

    def read_pages(self, blocks: Seq[int]) -> np.ndarray:
        """Keys and values of some pages in float32, scales applied: [len(blocks), L, 2, K, page, D]."""
        (group,), layout = self.pool, self.spec.layout
        ids = jnp.asarray([self._checked(block) for block in blocks], jnp.int32)
        layers = [
            read_pages(group, jnp.int32(i), ids, layout, jnp.dtype(jnp.float32)) for i in range(layout.num_layers)
        ]
        both = [
            np.stack([np.asarray(keys, np.float32), np.asarray(values, np.float32)], axis=1) for keys, values in layers
        ]
        return np.stack(both, axis=1)

    def poison(self, blocks: Seq[int]) -> None:
        """Fills pages with NaN, or their scales where integers are stored: for tests, which so prove that nobody reads a free page."""
        (group,), layout = self.pool, self.spec.layout
        floating = jnp.issubdtype(jnp.dtype(layout.dtype), jnp.floating)
        name, dtype = ("pages", layout.dtype) if floating else ("scales", "float32")
        if name == "scales" and layout.scales == "static":
            raise ValueError("a pool of integers with static scales has no place for NaN")
        array = getattr(group, name)
        nan = np.array(np.nan, jnp.dtype(dtype)).view(array.dtype)
        poisoned = array.at[:, jnp.asarray(blocks, jnp.int32)].set(nan)
        self.pool = (dataclasses.replace(group, **{name: jax.device_put(poisoned, array.sharding)}),)

    def _intact(self) -> bool:
        """Whether pool and state hold numbers: a step that fails has given away its buffers, or left the error in them."""
        leaves = jax.tree.leaves((self.pool, self._state))
        if any(leaf.is_deleted() for leaf in leaves):
            return False
        try:
            jax.block_until_ready(leaves)
        except Exception:
            return False
        return True

    def _checked(self, block: int) -> int:
        """JAX clamps ids that are out of range, so they are checked here."""
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} is not in the pool of {self.num_blocks} blocks")
        return block

    def _new_pool(self) -> KVPool:
        return create_pool(self.spec.mesh, self.spec.layout, self.num_blocks, self._static_scales)

    def _new_state(self) -> slot_state.SlotState:
        slots = self.buckets.max_num_seqs + 1
        return slot_state.initial_state(replicated(self.spec.mesh), slots, self.spec.model.vocab_size)

    def close(self) -> None:
        """Lets go of weights, pool and state."""
        self._guard.close()
        del self.pool, self._state, self._params
