"""`jaxkv serve`: an OpenAI-compatible HTTP endpoint."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from jaxkv.cli import options
from jaxkv.cli.log import log_to_stderr
from jaxkv.core.config import EngineConfig
from server.port import bind

if TYPE_CHECKING:
    from jaxkv.engine.async_engine import AsyncEngine

_SERVER = "Server"


def serve(
    model: options.Model = None,
    model_option: options.ModelOption = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The name that clients use; MODEL if not given.", rich_help_panel=_SERVER)
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=_SERVER)] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="Asked for on every route but /health and /ready.", rich_help_panel=_SERVER)
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get after SIGTERM.", rich_help_panel=_SERVER)
    ] = 30.0,
    max_queued_requests: options.MaxQueuedRequests = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    max_model_len: options.MaxModelLen = None,
    chat_template: options.ChatTemplate = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    attention_backend: options.AttentionBackend = None,
    compilation_cache_dir: options.CompilationCacheDir = None,
    seed: options.Seed = None,
    memory_utilization: options.MemoryUtilization = None,
    kv_cache_memory_bytes: options.KVCacheMemoryBytes = None,
    kv_cache_dtype: options.KVCacheDtype = None,
    kv_cache_scales: options.KVCacheScales = None,
    block_size: options.BlockSize = None,
    enable_prefix_caching: options.PrefixCaching = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    scheduling_policy: options.SchedulingPolicy = None,
) -> int:
    """Serve MODEL over HTTP, OpenAI-compatible."""
    settings = options.given(
        served_model_name=served_model_name,
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        memory_utilization=memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_scales=kv_cache_scales,
        enable_prefix_caching=enable_prefix_caching,
        scheduling_policy=scheduling_policy,
        tensor_parallel_size=tensor_parallel_size,
        attention_backend=attention_backend,
        max_queued_requests=max_queued_requests,
        chat_template=chat_template,
        seed=seed,
        compilation_cache_dir=compilation_cache_dir,
    )
    config = EngineConfig(model=options.chosen_model(model, model_option), **settings)
    if api_key == "":
        raise typer.BadParameter("--api-key is empty: give a key, or leave the option out")

    def load() -> AsyncEngine:
        # Imported here, in the loading thread: the port answers while JAX starts.
        from jaxkv.engine.async_engine import AsyncEngine
        from jaxkv.engine.build import build_engine

        return AsyncEngine(build_engine(config))

    log_to_stderr(logging.INFO)
    sock = bind(host, port)
    from server.launch import serve as run_server
    from server.settings import ServerSettings

    return run_server(sock, load, ServerSettings(api_key=api_key, shutdown_timeout=shutdown_timeout))
