"""Block and tile sizes of the attention kernels by device kind (`pallas_kernels.device_tables`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pallas_kernels.device_tables import current_device_kind, table


@dataclass(frozen=True, slots=True)
class TPUNumbers:
    """block_tokens, block_bytes: limits of a KV block, whichever is reached first. slots: KV blocks in memory, one in use.
    scores_at_once: of a prefill."""

    block_tokens: int
    block_bytes: int
    slots: int
    scores_at_once: int


@dataclass(frozen=True, slots=True)
class GPUNumbers:
    """sms: of the chip. shared_bytes: that one thread block may have; reserved_bytes of it go to barriers, reductions and the driver.
    decode_stages: key tiles in flight, at most. prefill: tiles by kind of call and head_dim."""

    sms: int
    shared_bytes: int
    reserved_bytes: int
    decode_stages: int
    prefill: dict[str, dict[str, Any]]


def tpu_numbers() -> TPUNumbers:
    """Of the TPU that is traced for. Any other device runs an interpreter: it gets those of a plain TPU."""
    kind = current_device_kind()
    numbers = table(__name__, kind if kind.startswith("TPU") else "TPU")
    return TPUNumbers(**numbers["kernel"])


def gpu_numbers() -> GPUNumbers:
    """Of the NVIDIA chip that is traced for. Any other device runs an interpreter, as above."""
    kind = current_device_kind()
    numbers = dict(table(__name__, kind if kind.startswith("NVIDIA") else "NVIDIA")["kernel"])
    sms = numbers.pop("sms")
    return GPUNumbers(sms=sms.get(kind, sms["NVIDIA"]), **numbers)
