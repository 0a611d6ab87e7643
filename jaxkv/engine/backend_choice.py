"""Which backends an engine uses, of attention and of matmuls: decided once, when it is built, and logged."""

from __future__ import annotations

import logging
from typing import cast

import jax

from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.models.config import ModelConfig
from jaxkv.models.params import matrix_shapes
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


def choose_matmul_backend(backend: Backend, shards: int, model: ModelConfig, dtype: str) -> dense_matmul.Backend:
    """The backend of the matmuls beside an attention backend: native code goes with native code, where weights are whole."""
    odd = [f"{name} has rows of {shape[-1]}" for name, shape in matrix_shapes(model).items() if shape[-1] % 2]
    if backend != "cpu_native":
        chosen, reason = "reference", "XLA"
    elif shards > 1:
        chosen, reason = "reference", f"XLA, as weights are spread over {shards} devices"
    elif dtype == "bfloat16" and odd:
        chosen, reason = "reference", f"XLA, as native code reads pairs of bfloat16, but {', '.join(odd)}"
    else:
        chosen, reason = "cpu_native", "native code for this CPU"
    log.info("matmul backend: %s (%s)", chosen, reason)
    return cast(dense_matmul.Backend, chosen)


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
