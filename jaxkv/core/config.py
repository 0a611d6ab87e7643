"""How an engine is built. Names are those of vLLM's flags where they mean the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jaxkv.core.errors import ConfigError

DType = Literal["auto", "bfloat16", "float32"]
Quantization = Literal["int8"]
KVCacheDType = Literal["auto", "bfloat16", "float32", "int8", "fp8_e4m3", "fp8_e5m2"]
QUANTIZED_KV_DTYPES = ("int8", "fp8_e4m3", "fp8_e5m2")
SchedulingPolicy = Literal["fcfs", "priority"]
AttentionBackend = Literal["auto", "reference", "cpu_native", "mosaic_tpu", "mosaic_gpu"]


DEFAULT_UTILIZATION = 0.9
"""Share of a device's memory."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that can be chosen when an engine is built. None means: chosen from the model and the device.

    dtype: of weights and activations; auto = bfloat16.
    quantization: int8 = weights in 8 bits with a scale per output, activations in 8 bits with a scale per row; None = off.
    max_model_len: tokens of prompt and output together, at most; None = the model's own limit.
    max_num_seqs: sequences that run at once; None = 32 on CPU, 256 elsewhere.
    max_num_batched_tokens: tokens of one step; None = 512 on CPU, 2,048 elsewhere.
    block_size: tokens of one KV page; None = the attention backend's default.
    kv_cache_dtype: auto = dtype; int8 and fp8 pools hold a byte per element and a float32 scale per token and head.
    kv_cache_scales: a JSON file of static scales, one per layer and KV head, in place of those per token
      (see `jaxkv.cache.static_scales`); None = none.
    attention_backend: auto = the best for the devices, see `pallas_kernels.backends`. With cpu_native matmuls are native too.
    memory_utilization: share of the device's memory (on CPU: of a quarter of the RAM) for weights, workspace and KV pages;
      None = 0.9, but on CPU no more than 2 GiB of KV pages per device, or one request of max_model_len if that is more.
    kv_cache_memory_bytes: bytes of the KV pool; set, it overrides memory_utilization.
    max_queued_requests: requests that may wait in an AsyncEngine, choices counted; None = no limit.
    seed: draws the seeds of requests that bring none.
    compilation_cache_dir: persistent XLA cache; None = under the user's cache directory, "" = off.
    """

    model: str
    served_model_name: str | None = None
    dtype: DType = "auto"
    quantization: Quantization | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    kv_cache_scales: str | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    tensor_parallel_size: int = 1
    attention_backend: AttentionBackend = "auto"
    max_queued_requests: int | None = None
    chat_template: str | None = None
    seed: int = 0
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        sizes = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes")
        for name in (*sizes, "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}: it must be a whole number of at least 1")
        if self.max_queued_requests is not None and self.max_queued_requests < 0:
            raise ConfigError(f"max_queued_requests is {self.max_queued_requests}: it must be at least 0")
        if self.memory_utilization is not None and not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization is {self.memory_utilization}: it must be in (0, 1]")
        _one_of("dtype", self.dtype, get_args(DType))
        if self.quantization is not None:
            _one_of("quantization", self.quantization, get_args(Quantization))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDType))
        if self.kv_cache_scales is not None and self.kv_cache_dtype not in QUANTIZED_KV_DTYPES:
            raise ConfigError(
                f"kv_cache_scales {self.kv_cache_scales!r} needs a quantized pool, but kv_cache_dtype is "
                f"{self.kv_cache_dtype}: choose one of {', '.join(QUANTIZED_KV_DTYPES)}, or leave the scales out"
            )
        _one_of("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        _one_of("attention_backend", self.attention_backend, get_args(AttentionBackend))


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}: it must be one of {', '.join(known)}")
