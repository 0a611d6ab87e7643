"""KV write: a step's new keys and values go into the pages of one layer."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import kv_orders_tpu
from pallas_kernels.backends import Backend, check_traced_chip
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write import cpu_native, mosaic_gpu, mosaic_tpu, reference


def write_kv(
    kv: KVPages,
    layer: Int[Array, ""],
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    *,
    layout: KVLayout,
    backend: Backend = "reference",
) -> KVPages:
    """Writes keys and values at (pages[t], offsets[t]) of `layer`; rows of padding point at the trash page, the last one.

    In place when the pool is donated or carried by a loop. A quantized pool stores x / scale, saturated: with token scales each
    row brings its own, which is stored beside it; static ones are read from the pool. Rows that two tokens name keep either
    token's values. With static scales cpu_native writes through XLA, which does it in place too. mosaic_tpu wants a sequence's tokens to
    follow each other, as they do in a step: its copies of 16 places would else undo each other.
    """
    if backend == "mosaic_gpu":
        check_traced_chip("KV write")
    if backend == "cpu_native" and layout.scales != "static":
        return cpu_native.write(kv, layer, keys, values, pages, offsets)
    if backend == "mosaic_tpu":
        return _write_on_tpu(kv, layer, keys, values, pages, offsets, layout)
    if backend == "mosaic_gpu":
        return mosaic_gpu.write(kv, layer, keys, values, pages, offsets, layout=layout)
    return reference.write(kv, layer, keys, values, pages, offsets, layout=layout)


def _write_on_tpu(
    kv: KVPages, layer: Array, keys: Array, values: Array, pages: Array, offsets: Array, layout: KVLayout
) -> KVPages:
    """The kernel takes rows as floats, and the scales of a token as one row."""
    keys, values, new = reference.stored(kv, layer, keys, values, layout=layout)
    rows = kv_orders_tpu.join(keys, values).astype(jnp.float32 if layout.dtype == "float32" else jnp.bfloat16)
    if new is None:
        return KVPages(mosaic_tpu.write(kv.pages, None, layer, rows, None, pages, offsets)[0], kv.scales)
    scales = jnp.stack(new, axis=-1).reshape(rows.shape[0], -1)
    return KVPages(*mosaic_tpu.write(kv.pages, kv.scales, layer, rows, scales, pages, offsets))
