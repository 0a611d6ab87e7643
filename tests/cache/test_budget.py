"""How many blocks a memory budget gives, and how a hopeless one is refused."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxkv.cache.budget import CPU_POOL_BYTES, DeviceMemory, device_memory, plan_pool
from jaxkv.core.errors import ConfigError
from pallas_kernels.kv_layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=4, head_dim=8, page_size=16, dtype="bfloat16")
PAGE = 2 * 2 * 4 * 8 * 2 * 16


def plan(**changes: Any) -> Any:
    return plan_pool(
        LAYOUT,
        **{
            "shards": 1,
            "memory": DeviceMemory(1000 * PAGE, 1000 * PAGE),
            "weight_bytes": 100 * PAGE,
            "workspace_bytes": 50 * PAGE,
            "memory_utilization": 0.9,
            "kv_cache_memory_bytes": None,
            "max_model_len": 256,
            "max_num_seqs": 1000,
            **changes,
        },
    )


def test_bytes_of_a_page() -> None:
    assert LAYOUT.bytes_per_page == PAGE
    assert LAYOUT.bytes_per_token * 16 == PAGE


def test_what_is_left_becomes_blocks() -> None:
    report = plan()
    assert report.num_blocks == 900 - 100 - 50 - 1  # the trash page comes out of the budget too
    assert report.kv_bytes == 750 * PAGE
    assert report.tokens == 749 * 16
    assert report.full_requests == pytest.approx(749 * 16 / 256)
    assert "749 blocks of 16 = 11984 tokens" in str(report)


def test_stated_bytes_override_the_share() -> None:
    assert plan(kv_cache_memory_bytes=33 * PAGE).num_blocks == 32


def test_stated_bytes_that_no_device_has() -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes is {851 * PAGE} .* lower --kv-cache-memory-bytes"):
        plan(kv_cache_memory_bytes=851 * PAGE)
    # More than usually counts of it may be stated.
    assert plan(kv_cache_memory_bytes=3850 * PAGE, memory=DeviceMemory(4000 * PAGE, 1000 * PAGE)).num_blocks == 3849


def test_devices_of_a_cpu_share_its_ram() -> None:
    alone, two = (device_memory(jax.devices("cpu")[0], shards) for shards in (1, 2))
    assert alone.total // 2 == two.total
    assert alone.usable == two.usable < alone.total
    assert alone.largest_pool == CPU_POOL_BYTES


def test_shards_hold_their_part_of_each_page() -> None:
    assert plan(kv_cache_memory_bytes=33 * PAGE, shards=4).num_blocks == 131


def test_on_a_cpu_nobody_is_surprised_by_a_large_pool() -> None:
    limit = 1000 * PAGE
    cpu = {"memory": DeviceMemory(400 * limit, 100 * limit, limit), "max_num_seqs": 10**6}
    assert plan(**cpu, memory_utilization=None).kv_bytes == limit
    assert plan(**cpu, memory_utilization=0.5).kv_bytes == 50 * limit - 150 * PAGE
    unlimited = {**cpu, "memory": DeviceMemory(400 * limit, 100 * limit)}
    assert plan(**unlimited, memory_utilization=None).kv_bytes == 90 * limit - 150 * PAGE
    assert plan(**cpu, memory_utilization=None, kv_cache_memory_bytes=3 * limit).kv_bytes == 3 * limit
    # One request of max_model_len fits where the memory allows it.
    long = 3 * 1000 * 16
    assert plan(**cpu, memory_utilization=None, max_model_len=long).num_blocks == 3000
    small = {**cpu, "memory": DeviceMemory(4 * limit, limit, limit)}
    with pytest.raises(ConfigError, match="Raise --memory-utilization"):
        plan(**small, memory_utilization=None, max_model_len=long)


def test_no_more_than_can_be_used() -> None:
    assert plan(max_num_seqs=2).num_blocks == 2 * 2 * 16
    assert plan(max_num_seqs=2, kv_cache_memory_bytes=701 * PAGE).num_blocks == 700


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_cache_memory_bytes": 10 * PAGE}, ["longest max_model_len that fits is 144", "--kv-cache-memory-bytes"]),
        ({"memory_utilization": 0.1}, ["not even one block fits", "--memory-utilization", "available are 0.0000 GiB"]),
    ],
)
def test_no_room(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError, match="No available memory for the cache blocks") as refused:
        plan(**changes)
    if "memory_utilization" in changes:
        words = [*words, "(now 0.1)"]
    for word in [*words, "max_model_len 256", f"({17 * PAGE} bytes)", "--max-model-len"]:
        assert word in str(refused.value)
