"""Numbers about a running engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of now and totals since the start. kv_usage: share of blocks held, 0 to 1."""

    num_running: int
    num_waiting: int
    kv_usage: float
    num_blocks: int
    num_blocks_held: int
    num_blocks_cached: int
    block_size: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    recompilations: int


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step. host_seconds: scheduling, batch building, detokenizing; device_seconds: waiting for the step's result."""

    num_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    host_seconds: float
    device_seconds: float
