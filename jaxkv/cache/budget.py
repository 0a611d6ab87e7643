"""How many KV blocks fit: the memory of a device less weights and workspace, or a stated number of bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxkv.core.config import DEFAULT_UTILIZATION
from jaxkv.core.errors import ConfigError
from pallas_kernels.kv_layout import KVLayout

CPU_SHARE = 0.25
"""Share of the RAM that counts as device memory on CPU, where other programs live too."""
_GIB = 1024**3
CPU_POOL_BYTES = 2 * _GIB
"""Of a pool on CPU whose size nobody has stated: memory is zeroed at the start, and other programs want some, too."""


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes per device, and what the KV pool holds.

    device_bytes: memory of one device (on CPU: CPU_SHARE of the RAM). blocks, tokens: capacity of the pool.
    full_requests: how many requests of max_model_len fit at once.
    """

    device_bytes: int
    weight_bytes: int
    workspace_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def full_requests(self) -> float:
        return self.tokens / self.max_model_len

    def __str__(self) -> str:
        def gib(count: int) -> str:
            return f"{count / _GIB:.2f} GiB"

        return (
            f"weights {gib(self.weight_bytes)}, workspace {gib(self.workspace_bytes)}, KV cache {gib(self.kv_bytes)} of "
            f"{gib(self.device_bytes)} per device: {self.num_blocks} blocks of {self.block_size} = {self.tokens} tokens, "
            f"{self.full_requests:.1f} requests of {self.max_model_len} tokens"
        )


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device. total: what there is. usable: what counts unless the pool's size is stated.

    largest_pool: of a pool for which neither size nor share is stated; None = no limit.
    """

    total: int
    usable: int
    largest_pool: int | None = None


def device_memory(device: jax.Device, shards: int) -> DeviceMemory:
    """Of each of `shards` devices like this one. Those of a CPU share its RAM."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return DeviceMemory(int(stats["bytes_limit"]), int(stats["bytes_limit"]))
    ram = _ram()
    return DeviceMemory(ram // shards, int(ram * CPU_SHARE), CPU_POOL_BYTES)


def _ram() -> int:
    """Bytes of RAM that this process may use: the machine's, or its container's limit (cgroup v2) if that is less."""
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else ""
    return min(ram, int(text)) if text.isdecimal() else ram


def plan_pool(
    layout: KVLayout,
    *,
    shards: int,
    memory: DeviceMemory,
    weight_bytes: int,
    workspace_bytes: int,
    memory_utilization: float | None,
    kv_cache_memory_bytes: int | None,
    max_model_len: int,
    max_num_seqs: int,
) -> MemoryReport:
    """Chooses the number of blocks. Raises ConfigError when not even one request of max_model_len fits.

    shards: devices over which KV heads are split; all byte counts are per device.
    Unless its bytes are stated, a pool takes no more than twice what max_num_seqs requests of max_model_len hold; if no share is
    stated either, no more than the device's largest pool, or one request.
    """
    page_bytes = layout.bytes_per_page // shards
    blocks_per_request = -(-max_model_len // layout.page_size)
    usable = kv_cache_memory_bytes
    if usable is not None:
        _check_stated(usable, memory.total, weight_bytes + workspace_bytes)
    else:
        usable = int(memory.usable * (memory_utilization or DEFAULT_UTILIZATION)) - weight_bytes - workspace_bytes
        if memory.largest_pool is not None and memory_utilization is None:
            usable = min(usable, max(memory.largest_pool, (blocks_per_request + 1) * page_bytes))
    # One page more than the ledger's blocks: the trash page.
    num_blocks = max(usable, 0) // page_bytes - 1
    if kv_cache_memory_bytes is None:
        num_blocks = min(num_blocks, 2 * blocks_per_request * max_num_seqs)
    if num_blocks < blocks_per_request:
        share = f"--memory-utilization (now {memory_utilization or DEFAULT_UTILIZATION})"
        flag = share if kv_cache_memory_bytes is None else "--kv-cache-memory-bytes"
        _refuse(page_bytes, usable, blocks_per_request, num_blocks, layout.page_size, max_model_len, flag)
    return MemoryReport(
        device_bytes=memory.usable,
        weight_bytes=weight_bytes,
        workspace_bytes=workspace_bytes,
        kv_bytes=(num_blocks + 1) * page_bytes,
        num_blocks=num_blocks,
        block_size=layout.page_size,
        max_model_len=max_model_len,
    )


def _check_stated(kv_bytes: int, device_bytes: int, other_bytes: int) -> None:
    if kv_bytes + other_bytes > device_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes is {kv_bytes} ({kv_bytes / _GIB:.2f} GiB), but a device has {device_bytes / _GIB:.2f} GiB, of which "
            f"weights and workspace take {other_bytes / _GIB:.2f} GiB: lower --kv-cache-memory-bytes"
        )


def _refuse(
    page_bytes: int,
    usable: int,
    blocks_per_request: int,
    num_blocks: int,
    page_size: int,
    max_model_len: int,
    flag: str,
) -> None:
    needed = (blocks_per_request + 1) * page_bytes
    longest = max(num_blocks, 0) * page_size
    fits = f"the longest max_model_len that fits is {longest}" if longest else "not even one block fits"
    raise ConfigError(
        f"No available memory for the cache blocks: one request of max_model_len {max_model_len} needs "
        f"{needed / _GIB:.4f} GiB ({needed} bytes), available are {max(usable, 0) / _GIB:.4f} GiB ({max(usable, 0)} bytes); "
        f"{fits}. Raise {flag}, lower --max-model-len, or use a smaller --dtype or a larger --tensor-parallel-size."
    )
