"""Builds an engine: model, mesh, memory budget, step, warm-up. What cannot work is an error here, never while serving."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from platformdirs import user_cache_dir

from jaxkv.cache.budget import MemoryReport, device_memory, plan_pool
from jaxkv.cache.static_scales import read_static_scales, split_static_scales
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import ConfigError
from jaxkv.engine.admission import Admission
from jaxkv.engine.backend_choice import choose_backend, choose_matmul_backend
from jaxkv.engine.engine import Engine
from jaxkv.models.config import ModelConfig
from jaxkv.models.params import Params
from jaxkv.runtime.head_split import check_rotated, split_heads, split_params
from jaxkv.runtime.host_memory import keep_freed_memory
from jaxkv.runtime.mesh import build_mesh, put_params
from jaxkv.runtime.packing import pack_layers, packable
from jaxkv.runtime.runner import Runner
from jaxkv.runtime.step import StepSpec
from jaxkv.runtime.step_batch import make_buckets
from jaxkv.runtime.workspace import workspace_bytes
from jaxkv.scheduling.config import SchedulerConfig
from jaxkv.scheduling.scheduler import Scheduler
from jaxkv.text.chat import compile_chat_template
from jaxkv.text.tokenizer import Tokenizer
from jaxkv.weights.hub import resolve
from jaxkv.weights.load import LoadedModel, load_model, read_config
from pallas_kernels.backends import TRAITS, Backend, check_backend, layout_for
from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.page_copy.api import check_supported as check_copies
from pallas_kernels.page_copy.api import kernel_of
from pallas_kernels.ragged_paged_attention.api import check_supported

log = logging.getLogger("jaxkv")
KV_DTYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""JAX's names of the KV dtypes that have names of their own there."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an Engine is made of. config is resolved; model_config is the model's own, before any split over devices."""

    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer
    generation_config: dict[str, Any]
    memory: MemoryReport
    runner: Runner
    scheduler: Scheduler
    admission: Admission


def build_engine(config: EngineConfig) -> Engine:
    """Loads the model that config names and builds the engine. Raises ConfigError and ModelLoadError."""
    use_compilation_cache(config.compilation_cache_dir)
    source = resolve(config.model)
    config = check_early(config, read_config(source))
    loaded = load_model(source, _dtype(config), config.quantization)
    tokenizer = tokenizer_of(loaded)
    eos_ids = tuple(dict.fromkeys((*loaded.eos_ids, *tokenizer.eos_ids)))
    return assemble(config, loaded.config, loaded.params, tokenizer, loaded.generation_config, eos_ids)


def check_early(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The config with its defaults filled in. Raises ConfigError for what cannot work whatever the weights, before they are read."""
    mesh = build_mesh(config.tensor_parallel_size)
    config = resolve_defaults(config, model, mesh.devices.flat[0])
    _scheduler_config(config, num_blocks=1)
    split = split_heads(model, config.tensor_parallel_size)
    if config.quantization is not None:
        check_rotated(model, split)
    _static_scales(config, model, split)
    return config


def assemble(
    config: EngineConfig,
    model: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    generation_config: dict[str, Any],
    eos_ids: Sequence[int],
) -> Engine:
    """Builds an engine from a model that is in host memory already, and warms it up. `params` is emptied on the way."""
    mesh = build_mesh(config.tensor_parallel_size)
    config = resolve_defaults(config, model, mesh.devices.flat[0])
    assert config.max_model_len
    assert config.max_num_seqs
    assert config.max_num_batched_tokens
    assert config.block_size
    template = _chat_template(config, tokenizer)
    shards = config.tensor_parallel_size
    split = split_heads(model, shards)
    if config.quantization is not None:
        check_rotated(model, split)
    backend = check_backend(config.attention_backend)
    layout = _checked_layout(config, split, backend)
    max_pages = -(-config.max_model_len // config.block_size)
    buckets = make_buckets(
        max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs, max_pages=max_pages
    )
    matmul_backend = choose_matmul_backend(backend, shards, split, config.dtype)
    placed = put_params(mesh, split, split_params(model, split, params))
    packed = matmul_backend == "cpu_native" and packable(split, placed)
    placed = pack_layers(split, placed) if packed else placed
    memory = plan_pool(
        layout,
        shards=shards,
        memory=device_memory(mesh.devices.flat[0], shards),
        weight_bytes=_bytes_per_device(placed),
        workspace_bytes=workspace_bytes(split, buckets, shards=shards),
        memory_utilization=config.memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    log.info("memory: %s", memory)
    spec = StepSpec(
        split,
        layout,
        mesh,
        backend,
        config.dtype,
        quantized=config.quantization is not None,
        matmul_backend=matmul_backend,
        packed=packed,
    )
    if mesh.devices.flat[0].platform == "cpu" and not keep_freed_memory():
        log.info("malloc of this system cannot be told to keep memory: steps may be slower")
    runner = Runner(spec, placed, buckets, memory.num_blocks, _static_scales(config, model, split))
    runner.warm_up()
    limits = _scheduler_config(config, memory.num_blocks)
    admission = Admission(
        tokenizer,
        vocab_size=model.vocab_size,
        eos_ids=eos_ids,
        limits=limits,
        chat_template=template,
        seed=config.seed,
    )
    return Engine(
        EngineParts(config, model, tokenizer, generation_config, memory, runner, Scheduler(limits), admission)
    )


def _checked_layout(config: EngineConfig, split: ModelConfig, backend: Backend) -> KVLayout:
    """The layout of the pool. Raises ConfigError for one that the backend's kernels cannot read, write or copy."""
    assert config.block_size
    try:
        layout = layout_for(
            backend,
            num_layers=split.num_layers,
            num_kv_heads=split.num_kv_heads,
            head_dim=split.head_dim,
            page_size=config.block_size,
            dtype=KV_DTYPES.get(config.kv_cache_dtype, config.kv_cache_dtype),
            static_scales=config.kv_cache_scales is not None,
            shards=config.tensor_parallel_size,
        )
        check_supported(backend, layout, num_heads=split.num_heads)
        check_copies(backend, layout)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    log.info("page copies: %s", kernel_of(backend))
    return layout


def resolve_defaults(config: EngineConfig, model: ModelConfig, device: jax.Device) -> EngineConfig:
    """Fills in what config leaves open. Raises ConfigError for what the model cannot do."""
    on_cpu = device.platform == "cpu"
    max_model_len = config.max_model_len or model.max_position
    if max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model's context is {model.max_position} tokens: lower it"
        )
    max_num_seqs = config.max_num_seqs or (32 if on_cpu else 256)
    batched = config.max_num_batched_tokens or max(512 if on_cpu else 2048, max_num_seqs)
    backend = choose_backend(config, device)
    return dataclasses.replace(
        config,
        dtype=_dtype(config),
        kv_cache_dtype=_dtype(config) if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=config.block_size or TRAITS[backend].page_size,
        attention_backend=backend,
    )


def tokenizer_of(loaded: LoadedModel) -> Tokenizer:
    """The tokenizer that came with the weights."""
    if loaded.tokenizer_data is not None:
        return Tokenizer.from_gguf_metadata(loaded.tokenizer_data)
    return Tokenizer.from_hf_dir(loaded.source.path, extra_eos_ids=loaded.eos_ids)


def use_compilation_cache(directory: str | None) -> None:
    """Turns on JAX's persistent compilation cache, unless the program has chosen one; "" leaves it as it is."""
    if directory == "" or (directory is None and jax.config.jax_compilation_cache_dir):
        return
    path = Path(directory) if directory else Path(user_cache_dir("jaxkv")) / "xla"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _dtype(config: EngineConfig) -> Literal["bfloat16", "float32"]:
    return "bfloat16" if config.dtype == "auto" else config.dtype


def _chat_template(config: EngineConfig, tokenizer: Tokenizer) -> str | None:
    """The template of --chat-template (a file, or the template itself), else the model's; compiled once to check it."""
    template = tokenizer.chat_template
    if config.chat_template is not None:
        given = config.chat_template
        is_text = "{" in given or "\n" in given
        if not is_text and not Path(given).is_file():
            raise ConfigError(f"chat_template {given!r} is neither a file nor a Jinja template")
        try:
            template = given if is_text else Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the chat template {given} cannot be read: {error}") from error
    if template is not None:
        compile_chat_template(template)
    return template


def _static_scales(
    config: EngineConfig, model: ModelConfig, split: ModelConfig
) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """The scales that config names, for the KV heads of the split model."""
    if config.kv_cache_scales is None:
        return None
    scales = read_static_scales(
        config.kv_cache_scales,
        kv_cache_dtype=config.kv_cache_dtype,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
    )
    return split_static_scales(scales, split.num_kv_heads, model.group_size // split.group_size)


def _scheduler_config(config: EngineConfig, num_blocks: int) -> SchedulerConfig:
    assert config.max_model_len
    assert config.max_num_seqs
    assert config.max_num_batched_tokens
    assert config.block_size
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def _bytes_per_device(params: Params) -> int:
    leaves = jax.tree.leaves(params)
    return int(sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves))
