"""The backends of the attention and KV-write kernels: which chip each is for, and which pool layout it reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from pallas_kernels.device_tables import current_device_kind
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


HOPPER_CHIPS = ("H100", "H200", "H800", "H20", "GH200")
"""What the device kinds of chips with `wgmma` (sm_90a) have in their names."""


def check_backend(name: str) -> Backend:
    """The name, known to be one of BACKENDS. Raises ValueError."""
    for backend in BACKENDS:
        if name == backend:
            return backend
    raise ValueError(f"attention backend {name!r} is unknown: it must be one of {', '.join(BACKENDS)}")


def layout_for(
    backend: Backend,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: str,
    static_scales: bool = False,
    shards: int = 1,
) -> KVLayout:
    """The pool that `backend` reads on `shards` devices together.

    A quantized pool gets scales per token and head, or static ones per layer and head.
    """
    scales: KVScales = "none"
    if dtype in QUANTIZED_DTYPES:
        scales = "static" if static_scales else "token"
    order, as_bytes = TRAITS[backend].order, backend == "reference" and dtype.startswith("float8")
    return KVLayout(num_layers, num_kv_heads, head_dim, page_size, dtype, order, scales, shards, as_bytes)


def is_hopper(device_kind: str) -> bool:
    """Whether the Mosaic GPU kernels run there. Blackwell (sm_100) has no `wgmma`, nor have the chips before Hopper."""
    return any(chip in device_kind for chip in HOPPER_CHIPS)


def check_traced_chip(op: str) -> None:
    """Raises ValueError if `op` on `mosaic_gpu` is traced for a chip that is no Hopper. On a CPU it is interpreted."""
    device = current_device_kind()
    if device != "cpu" and not is_hopper(device):
        raise ValueError(
            f"{op} on backend 'mosaic_gpu' needs a Hopper chip (sm_90a, for wgmma), but this is a {device}: use 'reference'"
        )


def check_device(backend: Backend, platform: str, device_kind: str) -> None:
    """Raises ValueError if `backend` does not run on such devices."""
    wanted = TRAITS[backend].platform
    if wanted not in (None, platform):
        raise ValueError(f"it runs on {wanted} devices, but this is a {platform} ({device_kind})")
    if backend == "mosaic_gpu" and platform == "gpu" and not is_hopper(device_kind):
        raise ValueError(
            f"it needs a Hopper chip (sm_90a, for wgmma), but this is a {device_kind}: `reference` runs there"
        )


def best_for(platform: str, device_kind: str) -> tuple[Backend, str]:
    """The backend for some devices, and why, for the log."""
    if platform == "tpu":
        return "mosaic_tpu", "Mosaic kernels for TPU"
    if platform == "gpu" and is_hopper(device_kind):
        return "mosaic_gpu", "Mosaic GPU kernels for Hopper"
    if platform == "gpu":
        return "reference", (
            f"XLA, as {device_kind} is no Hopper chip (sm_90a), whose wgmma the Mosaic GPU kernels need; "
            "of the quantized KV caches int8 runs on all chips, FP8 is emulated before sm_89"
        )
    return "cpu_native", "native code for this CPU"


def why_not_fp8(platform: str, compute_capability: str) -> str | None:
    """Why an FP8 KV cache is a poor choice on a device, and what is better; None where the hardware converts FP8."""
    if platform != "gpu" or not re.fullmatch(r"\d+\.\d+", compute_capability):
        return None
    if tuple(map(int, compute_capability.split("."))) >= (8, 9):
        return None
    return (
        f"FP8 is emulated on chips of compute capability {compute_capability}: an int8 KV cache is as small and faster"
    )
