"""KV write: a step's new keys and values go into the pages of one layer."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Array, Float, Int

from pallas_kernels import kv_layout
from pallas_kernels.kv_layout import KVPages
from pallas_kernels.kv_write import cpu_native

Backend = Literal["reference", "cpu_native"]
BACKENDS: tuple[Backend, ...] = ("reference", "cpu_native")


def write_kv(
    kv: KVPages,
    layer: Int[Array, ""],
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
    *,
    backend: Backend = "reference",
) -> KVPages:
    """Writes keys and values at (pages[t], offsets[t]) of `layer`; rows of padding point at the trash page.

    In place when the pool is donated or carried by a loop. A pool with scales (int8; cpu_native only) gets each row's own
    scale, its largest magnitude / 127. A row that two tokens name keeps either token's values.
    """
    if backend == "cpu_native":
        return cpu_native.write(kv, layer, keys, values, pages, offsets)
    if backend != "reference":
        raise ValueError(f"KV write backend {backend!r} is unknown: it must be one of {', '.join(BACKENDS)}")
    return kv_layout.write_kv(kv, layer, keys, values, pages, offsets)
