"""The producing warpgroup of the Hopper matmul: tiles of activations and weights to shared memory, int4 to bfloat16."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.memory import Ref
from pallas_kernels.quantized_matmul.mosaic_gpu_call import Call, Part


def produce(call: Call, part: Part) -> None:
    """Copies the tiles of every step into the rings that the consumers read."""
    pl.loop(0, part.count)(lambda i: _fetch(call, part, i))
    call.rings[0].drain(part.count)


def produce_widened(call: Call, part: Part) -> None:
    """Copies the tiles of every step, and unpacks the weights of each as it arrives."""
    ahead = call.kernel.tiles.stages - 1
    x_ring, w_ring = call.rings
    pl.loop(0, jnp.minimum(part.count, ahead))(lambda i: _fetch(call, part, i))

    @pl.loop(0, part.count)
    def _widen(i: Array) -> None:
        pl.when(i + ahead < part.count)(lambda: _fetch(call, part, i + ahead))
        packed = w_ring.wait(i)
        _unpack(packed, call.wide.claim(i))
        plgpu.commit_smem()
        call.wide.publish(i)

    x_ring.drain(part.count)
    call.wide.drain(part.count)


def _fetch(call: Call, part: Part, i: Array) -> None:
    """Starts the copies of both tiles of step i, once their slot is free."""
    kernel, step, (x_ring, w_ring) = call.kernel, part.first + i, call.rings
    x_tile, w_tile, full = x_ring.claim(i), w_ring.at(i), x_ring.filling(i)
    rows = pl.ds(pl.multiple_of(part.token, kernel.tokens), kernel.tokens)
    plgpu.copy_gmem_to_smem(call.x.at[rows, _columns(step, kernel.inputs)], x_tile, full)
    stored = call.w.shape[2] // kernel.steps
    plgpu.copy_gmem_to_smem(call.w.at[part.layer, part.columns, _columns(step, stored)], w_tile, full)


def _columns(step: Array, width: int) -> pl.Slice:
    return pl.ds(pl.multiple_of(step * width, width), width)


def _unpack(packed: Ref, wide: Ref) -> None:
    """A tile of bytes as bfloat16: the low halves of a group's bytes, then the high ones."""
    half = packed.shape[1]
    layout = plgpu.Layout.SMEM_GMEM_COPY(packed.shape, jnp.bfloat16, half * 2)
    values = plgpu.load(packed, layout=layout, optimized=False)
    low = (values & jnp.uint8(0x0F)).astype(jnp.bfloat16)
    # Shifts of 8-bit values are not to be had.
    high = (values & jnp.uint8(0xF0)).astype(jnp.bfloat16) * jnp.bfloat16(1 / 16)
    for begin, steps in ((0, low), (half, high)):
        wide.at[:, pl.ds(begin, half)][...] = steps
