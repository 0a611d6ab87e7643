"""Options that several commands have: fields of EngineConfig under vLLM's names. None leaves the field's default."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from jaxkv.weights.catalog import DEFAULT_MODEL

_MODEL = "Model"
_CACHE = "KV cache"
_SCHEDULING = "Scheduling"

Model = Annotated[
    str | None,
    typer.Argument(help=f"Catalog alias, directory, .gguf file or Hugging Face repo id. Default: {DEFAULT_MODEL}."),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="The same as MODEL.")]
Dtype = Annotated[
    str | None, typer.Option(help="Of weights and activations: auto, bfloat16, float32.", rich_help_panel=_MODEL)
]
Quantization = Annotated[
    str | None, typer.Option(help="int8: weights in 8 bits, quantized while loading.", rich_help_panel=_MODEL)
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="Most tokens of prompt and output together.", rich_help_panel=_MODEL)
]
ChatTemplate = Annotated[
    str | None, typer.Option(help="A Jinja file in place of the model's own template.", rich_help_panel=_MODEL)
]
TensorParallelSize = Annotated[int | None, typer.Option(help="Devices to shard over.", rich_help_panel=_MODEL)]
AttentionBackend = Annotated[
    str | None, typer.Option(help="auto, reference, cpu_native, mosaic_tpu, mosaic_gpu.", rich_help_panel=_MODEL)
]
CompilationCacheDir = Annotated[
    str | None,
    typer.Option(help='Where compiled steps are kept; "" keeps none.', rich_help_panel=_MODEL, show_default=False),
]
MemoryUtilization = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization",
        "--memory-utilization",
        help="Share of the device's memory (on CPU: of a quarter of the RAM) to use. Default: 0.9; on CPU at most 2 GiB of KV cache.",
        rich_help_panel=_CACHE,
    ),
]
KVCacheMemoryBytes = Annotated[
    int | None,
    typer.Option("--kv-cache-memory-bytes", help="Size of the KV pool, whatever the share.", rich_help_panel=_CACHE),
]
KVCacheDtype = Annotated[
    str | None,
    typer.Option("--kv-cache-dtype", help="auto, bfloat16, float32, int8, fp8_e4m3, fp8_e5m2.", rich_help_panel=_CACHE),
]
KVCacheScales = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-scales", help="A JSON file of static scales for an int8 or FP8 pool.", rich_help_panel=_CACHE
    ),
]
BlockSize = Annotated[int | None, typer.Option(help="Tokens per KV page.", rich_help_panel=_CACHE)]
PrefixCaching = Annotated[
    bool | None,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Reuse the pages of equal prompt beginnings (on by default).",
        rich_help_panel=_CACHE,
    ),
]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Sequences that run at once.", rich_help_panel=_SCHEDULING)]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Tokens per step.", rich_help_panel=_SCHEDULING)]
SchedulingPolicy = Annotated[str | None, typer.Option(help="fcfs or priority.", rich_help_panel=_SCHEDULING)]
MaxQueuedRequests = Annotated[
    int | None, typer.Option(help="Requests that may wait; more get 503.", rich_help_panel=_SCHEDULING)
]
Seed = Annotated[int | None, typer.Option(help="Draws the seeds of requests that bring none.", rich_help_panel=_MODEL)]


def given(**values: Any) -> dict[str, Any]:
    """The options that were given: of the others, the defaults hold."""
    return {name: value for name, value in values.items() if value is not None}


def chosen_model(argument: str | None, option: str | None) -> str:
    """MODEL or --model, or the default. Raises a usage error when both are given and differ."""
    if argument and option and argument != option:
        raise typer.BadParameter(f"MODEL is {argument!r} and --model is {option!r}: give one of them")
    return argument or option or DEFAULT_MODEL
