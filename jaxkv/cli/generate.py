"""`jaxkv generate`: one prompt, answered in the terminal."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer

from jaxkv.cli import options
from jaxkv.cli.log import log_to_stderr
from jaxkv.core.config import EngineConfig
from jaxkv.core.errors import JaxkvError
from jaxkv.weights.catalog import DEFAULT_MODEL

_SAMPLING = "Sampling"


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; read from stdin if it is - or not given.")] = None,
    model: Annotated[
        str, typer.Option(help="Catalog alias, directory, .gguf file or Hugging Face repo id.")
    ] = DEFAULT_MODEL,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens to generate; as much as fits if not given.", rich_help_panel=_SAMPLING),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)] = None,
    top_p: Annotated[float | None, typer.Option(rich_help_panel=_SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(rich_help_panel=_SAMPLING)] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same answer.", rich_help_panel=_SAMPLING)] = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    max_model_len: options.MaxModelLen = None,
    chat_template: options.ChatTemplate = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    attention_backend: options.AttentionBackend = None,
    compilation_cache_dir: options.CompilationCacheDir = None,
    memory_utilization: options.MemoryUtilization = None,
    kv_cache_memory_bytes: options.KVCacheMemoryBytes = None,
    kv_cache_dtype: options.KVCacheDtype = None,
    kv_cache_scales: options.KVCacheScales = None,
    block_size: options.BlockSize = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
) -> None:
    """Answer one prompt and stream it to the terminal."""
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template: leave out --raw")
    text = _prompt_text(prompt)
    log_to_stderr(logging.WARNING)
    settings = options.given(
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        chat_template=chat_template,
        tensor_parallel_size=tensor_parallel_size,
        attention_backend=attention_backend,
        compilation_cache_dir=compilation_cache_dir,
        memory_utilization=memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_scales=kv_cache_scales,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    # One request at a time: a small batch keeps the start short.
    config = EngineConfig(model=model, max_num_seqs=1, **settings)
    sampling = options.given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    _answer(config, text if raw else _chat(text, system), sampling)


def _answer(config: EngineConfig, prompt: Any, sampling: dict[str, Any]) -> None:
    from jaxkv.engine.build import build_engine

    engine = build_engine(config)
    for delta in engine.stream(prompt, engine.default_sampling_params(**sampling)):
        for choice in delta.choices:
            sys.stdout.write(choice.text)
            if choice.error is not None:
                raise JaxkvError(choice.error)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _prompt_text(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise typer.BadParameter("no prompt: give it as an argument or through stdin")
    text = sys.stdin.read() if prompt in (None, "-") else prompt
    if not text:
        raise typer.BadParameter("the prompt is empty")
    return text


def _chat(text: str, system: str | None) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]
