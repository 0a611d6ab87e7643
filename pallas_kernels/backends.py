"""The backends of the attention and KV-write kernels: which chip each is for, and which pool layout it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pallas_kernels.kv_layout import QUANTIZED_DTYPES, KVLayout, KVOrder, KVScales

Backend = Literal["reference", "cpu_native", "mosaic_tpu", "mosaic_gpu"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True, slots=True)
class Traits:
    """platform: JAX's name of the devices it runs on, None = any. page_size: the default, tokens of a page."""

    platform: str | None
    order: KVOrder
    page_size: int


TRAITS: dict[Backend, Traits] = {
    "reference": Traits(None, "head_major", 16),
    "cpu_native": Traits("cpu", "head_major", 16),
    # A page is one copy: 128 tokens keep the copies few and the decode kernel memory-bound (tuning/tpu.json).
    "mosaic_tpu": Traits("tpu", "token_major", 128),
    # A page of one head is one TMA copy, and 64 keys are a tile of the decode kernel.
    "mosaic_gpu": Traits("gpu", "head_major", 64),
}


def check_backend(name: str) -> Backend:
    """The name, known to be one of BACKENDS. Raises ValueError."""
    for backend in BACKENDS:
        if name == backend:
            return backend
    raise ValueError(f"attention backend {name!r} is unknown: it must be one of {', '.join(BACKENDS)}")


def layout_for(
    backend: Backend, *, num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: str, shards: int = 1
) -> KVLayout:
    """The pool that `backend` reads on `shards` devices together. A quantized pool gets scales per token and head."""
    scales: KVScales = "token" if dtype in QUANTIZED_DTYPES else "none"
    return KVLayout(num_layers, num_kv_heads, head_dim, page_size, dtype, TRAITS[backend].order, scales, shards)


def best_for(platform: str, device_kind: str) -> tuple[Backend, str]:
    """The backend for some devices, and why, for the log."""
    if platform == "tpu":
        return "mosaic_tpu", "Mosaic kernels for TPU"
    if platform == "gpu" and any(chip in device_kind for chip in ("H100", "H200", "H800", "GH200")):
        return "mosaic_gpu", "Mosaic GPU kernels for Hopper"
    if platform == "gpu":
        return "reference", f"XLA, as {device_kind} is no Hopper chip, which the Mosaic GPU kernels need"
    return "cpu_native", "native code for this CPU"
