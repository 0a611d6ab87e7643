"""KV write: a step's new keys and values go into the pages of one layer."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Backend
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write import cpu_native, reference


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
    token's values.
    """
    if backend == "cpu_native" and layout.scales != "static":
        return cpu_native.write(kv, layer, keys, values, pages, offsets)
    return reference.write(kv, layer, keys, values, pages, offsets, layout=layout)
