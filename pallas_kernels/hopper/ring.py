"""Rings of tiles in shared memory, with which one warpgroup runs ahead of others."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.memory import Ref


@dataclass(frozen=True)
class Ring:
    """One ring of tiles: tile number t lies in slot t % slots. Its barriers are full[first + slot] and free[first +
    slot]; none says that a slot is free where its reader is also who fills it."""

    tiles: Ref
    full: Ref
    free: Ref
    slots: int
    first: int = 0

    def slot(self, t: Array) -> Array:
        # With one slot it is always 0, but not to the compiler, which would keep all descriptors of the tile in registers.
        return lax.rem(t, jnp.int32(self.slots)) if self.slots > 1 else jnp.where(t >= 0, 0, 1)

    def at(self, t: Array) -> Ref:
        return self.tiles.at[self.slot(t)]

    def filling(self, t: Array) -> Ref:
        """The barrier that says that the tile is full."""
        return self.full.at[self.slot(t) + self.first]

    def wait(self, t: Array) -> Ref:
        """The tile, once it is full."""
        plgpu.barrier_wait(self.filling(t))
        return self.at(t)

    def release(self, t: Array) -> None:
        plgpu.barrier_arrive(self.free.at[self.slot(t) + self.first])

    def claim(self, t: Array) -> Ref:
        """The tile's place, once its former tile is released; the first round finds it empty."""
        pl.when(t >= self.slots)(lambda: plgpu.barrier_wait(self.free.at[self.slot(t) + self.first]))
        return self.at(t)

    def publish(self, t: Array) -> None:
        plgpu.barrier_arrive(self.filling(t))

    def drain(self, total: Array) -> None:
        """Waits until the last of `total` tiles is released: barriers end in a phase that their waiter has seen."""

        @pl.loop(total, total + self.slots)
        def _wait(t: Array) -> None:
            self.claim(t)
