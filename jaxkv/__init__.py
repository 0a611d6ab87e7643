"""jaxkv serves large language models from a paged KV cache, on TPU, NVIDIA GPU and CPU.

Names are imported when they are first used, so that a command that needs no engine starts without JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxkv.core.config import EngineConfig
    from jaxkv.core.errors import (
        ConfigError,
        EngineStoppedError,
        JaxkvError,
        ModelLoadError,
        QueueFullError,
        RequestError,
    )
    from jaxkv.core.outputs import (
        CompletionDelta,
        CompletionOutput,
        RequestDelta,
        RequestOutput,
        RequestTimes,
        TokenLogprob,
        join_deltas,
    )
    from jaxkv.core.sampling_params import SamplingParams
    from jaxkv.engine.async_engine import AsyncEngine, RequestStream
    from jaxkv.engine.engine import Engine
    from jaxkv.engine.request import Prompt, Request
    from jaxkv.engine.stats import EngineStats, StepStats
    from jaxkv.text.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "CompletionDelta",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "EngineStoppedError",
    "JaxkvError",
    "ModelLoadError",
    "Prompt",
    "QueueFullError",
    "Request",
    "RequestDelta",
    "RequestError",
    "RequestOutput",
    "RequestStream",
    "RequestTimes",
    "SamplingParams",
    "StepStats",
    "TokenLogprob",
    "Tokenizer",
    "__version__",
    "join_deltas",
]

_HOMES = {
    "jaxkv.core.config": ("EngineConfig",),
    "jaxkv.core.errors": (
        "ConfigError",
        "EngineStoppedError",
        "JaxkvError",
        "ModelLoadError",
        "QueueFullError",
        "RequestError",
    ),
    "jaxkv.core.outputs": (
        "CompletionDelta",
        "CompletionOutput",
        "RequestDelta",
        "RequestOutput",
        "RequestTimes",
        "TokenLogprob",
        "join_deltas",
    ),
    "jaxkv.core.sampling_params": ("SamplingParams",),
    "jaxkv.engine.async_engine": ("AsyncEngine", "RequestStream"),
    "jaxkv.engine.engine": ("Engine",),
    "jaxkv.engine.request": ("Prompt", "Request"),
    "jaxkv.engine.stats": ("EngineStats", "StepStats"),
    "jaxkv.text.tokenizer": ("Tokenizer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value
