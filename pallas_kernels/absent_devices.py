"""Chips that are not here: how to compile for them, and what each chip can do by its data sheet.

TPUs need libtpu, NVIDIA chips the CUDA plugin of JAX with nvcc's ptxas (`pip install 'jaxkv[aot]'` brings both); neither needs a
driver. Both compile on x86-64 Linux only.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

H100_TARGET = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
"""
"""An H100 as XLA wants it described."""


@dataclass(frozen=True, slots=True)
class Chip:
    """platform: JAX's name. hbm_bytes: memory of one chip. hbm_rate: bytes/s. flops, flops8: peak operations/s of 16-bit and 8-bit
    matmuls (int8; FP8 likewise where the chip has it). topologies: JAX's names of slices, by their number of chips."""

    platform: str
    hbm_bytes: int
    hbm_rate: float
    flops: float
    flops8: float
    topologies: dict[int, str]


CHIPS: dict[str, Chip] = {
    "v4": Chip("tpu", 32 * 2**30, 1228e9, 275e12, 275e12, {4: "v4:2x2x1", 8: "v4:2x2x2"}),
    "v5e": Chip("tpu", 16 * 2**30, 819e9, 197e12, 394e12, {4: "v5e:2x2", 8: "v5e:2x4"}),
    "v5p": Chip("tpu", 95 * 2**30, 2765e9, 459e12, 918e12, {4: "v5p:2x2x1", 8: "v5p:2x2x2"}),
    "v6e": Chip("tpu", 32 * 2**30, 1640e9, 918e12, 1836e12, {4: "v6e:2x2", 8: "v6e:2x4"}),
    "h100": Chip("gpu", 80 * 10**9, 3352e9, 989e12, 1979e12, {1: "1x1x1", 8: "1x1x8"}),
    "h200": Chip("gpu", 141 * 10**9, 4800e9, 989e12, 1979e12, {1: "1x1x1", 8: "1x1x8"}),
}


def why_unavailable(chip: str) -> str | None:
    """Why nothing can be compiled for `chip` here; None if it can."""
    if CHIPS[chip].platform == "tpu":
        return None if importlib.util.find_spec("libtpu") else "libtpu is not installed: pip install 'jaxkv[aot]'"
    names = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if any(importlib.util.find_spec(name) for name in names):
        return None
    return "the CUDA plugin of JAX is not installed: pip install 'jaxkv[aot]'"


@cache
def absent_devices(chip: str, count: int = 1) -> Sequence[jax.Device]:
    """`count` devices (at most 8) of a chip, to compile for; nothing can run on them."""
    kind = CHIPS[chip]
    slice_name = kind.topologies[min(size for size in kind.topologies if size >= count)]
    if kind.platform == "gpu":
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        topology = topologies.get_topology_desc("gpu", "cuda", target_config=H100_TARGET, topology=slice_name)
    else:
        os.environ.update(
            TPU_SKIP_MDS_QUERY="1",
            TPU_ACCELERATOR_TYPE="v5litepod-4",
            TPU_WORKER_HOSTNAMES="localhost",
            ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        )
        topology = topologies.get_topology_desc(platform="tpu", topology_name=slice_name)
    devices: Sequence[jax.Device] = topology.devices[:count]
    return devices


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """A client without a device can write programs to the persistent cache, but not read them."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def mesh_of_one(chip: str) -> Mesh:
    """A mesh of one absent device: what is traced under it is traced for that chip."""
    return Mesh(np.array(absent_devices(chip)), ("device",))


def compile_for(chip: str, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """`function` compiled for one absent device and arguments like `args`, arrays or shapes."""
    mesh = mesh_of_one(chip)
    placed = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), args)
    with without_compilation_cache(), jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donate).lower(*shapes).compile()
