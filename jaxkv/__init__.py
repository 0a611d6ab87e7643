"""jaxkv serves large language models from a paged KV cache, on TPU, NVIDIA GPU and CPU."""

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
