"""Which attention backend an engine uses: decided once, when it is built, and logged."""

from __future__ import annotations

import logging

import jax

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from pallas_kernels.backends import Backend, best_for, check_backend, check_device, why_not_fp8
from pallas_kernels.cuda_compiler import CudaCompilerError
from pallas_kernels.dense_matmul import api as dense_matmul
from pallas_kernels.native.build import NativeBuildError
from pallas_kernels.ragged_paged_attention.api import prepare

log = logging.getLogger("jaxkv")


def choose_backend(config: EngineConfig, device: jax.Device) -> Backend:
    """The backend that config asks for, or for auto the best for the device. Raises ConfigError if it cannot run there."""
    if config.kv_cache_dtype.startswith("fp8"):
        advice = why_not_fp8(device.platform, str(getattr(device, "compute_capability", "")))
        if advice is not None:
            log.warning("kv_cache_dtype %s: %s", config.kv_cache_dtype, advice)
    if config.attention_backend != "auto":
        return _asked_for(check_backend(config.attention_backend), device)
    backend, reason = best_for(device.platform, device.device_kind)
    if backend == "cpu_native" and config.kv_cache_dtype in ("fp8_e4m3", "fp8_e5m2"):
        backend, reason = "reference", "XLA, as native code for CPU reads no FP8 pages: int8 ones are faster here"
    try:
        prepare(backend)
    except (NativeBuildError, CudaCompilerError) as error:
        # On a GPU this costs most of the speed.
        level = logging.WARNING if device.platform == "gpu" else logging.INFO
        log.log(level, "attention backend: reference (XLA, as %s cannot be used here: %s)", backend, error)
        return "reference"
    log.info("attention backend: %s (%s)", backend, reason)
    return backend


def choose_matmul_backend(backend: Backend, shards: int) -> dense_matmul.Backend:
    """The backend of the matmuls beside an attention backend: native code goes with native code, where weights are whole."""
    if backend == "cpu_native" and shards == 1:
        log.info("matmul backend: cpu_native (native code for this CPU)")
        return "cpu_native"
    log.info("matmul backend: reference (XLA)")
    return "reference"


def _asked_for(backend: Backend, device: jax.Device) -> Backend:
    try:
        check_device(backend, device.platform, device.device_kind)
    except ValueError as error:
        raise ConfigError(f"attention_backend {backend} cannot be used: {error}; choose another, or auto") from error
    try:
        prepare(backend)
    except (NativeBuildError, CudaCompilerError) as error:
        raise ConfigError(f"attention_backend {backend} cannot be used here: {error}") from error
    return backend
