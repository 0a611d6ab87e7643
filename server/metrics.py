"""Prometheus metrics: vLLM's names under the prefix `jaxkv:`. No label takes a value from a request.

Totals and gauges are read from the engine when they are scraped; histograms are fed as steps and requests end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxkv.core.config import DEFAULT_UTILIZATION
from jaxkv.core.outputs import RequestTimes

if TYPE_CHECKING:
    from jaxkv.engine.async_engine import AsyncEngine
    from jaxkv.engine.stats import EngineStats, StepStats

PREFIX = "jaxkv:"

_FINE_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
_STEP_SECONDS = (0.0001, 0.00025, 0.0005, *_FINE_SECONDS)
_REQUEST_SECONDS = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._registry = CollectorRegistry()
        self._model = engine.engine.model_name
        self._registry.register(_EngineCollector(engine))
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", (*_FINE_SECONDS, 20.0, 40.0, 80.0, 160.0)
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of a request.", _FINE_SECONDS
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, per request.", _FINE_SECONDS
        )
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Arrival to the end.", _REQUEST_SECONDS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to the first step.", _REQUEST_SECONDS)
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", _REQUEST_SECONDS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "First token to last token.", _REQUEST_SECONDS
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Generated tokens per request.", _TOKENS)
        self._iteration_tokens = self._histogram("iteration_tokens_total", "Tokens per engine step.", _STEP_TOKENS)
        self._step_host = self._histogram(
            "step_host_seconds", "Host time of a step, not hidden by the device.", _STEP_SECONDS
        )
        self._step_device = self._histogram(
            "step_device_seconds", "Time of a step waiting for the device.", _STEP_SECONDS
        )
        self._success = Counter(
            PREFIX + "request_success", "Ended choices.", ["model_name", "finished_reason"], registry=self._registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(self._model, reason)
        self._last_step = engine.engine.last_step
        engine.on_step.append(self._observe_step)

    def ended(self, reason: str) -> None:
        """One choice ended with this finish reason."""
        self._success.labels(self._model, reason).inc()

    def observe_times(self, times: RequestTimes, num_output_tokens: int) -> None:
        """The latencies of a finished request. num_output_tokens: of its longest choice."""
        started, first, last, end = times.first_scheduled, times.first_token, times.last_token, times.finished
        if started is not None:
            self.queue_time.observe(started - times.arrival)
        if started is not None and first is not None:
            self.prefill_time.observe(first - started)
        if first is not None and last is not None:
            self.decode_time.observe(last - first)
            if num_output_tokens > 1:
                self.time_per_output_token.observe((last - first) / (num_output_tokens - 1))
        if end is not None:
            self.e2e_latency.observe(end - times.arrival)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def _observe_step(self, step: StepStats, _stats: EngineStats) -> None:
        if step is self._last_step:
            return  # A round of the loop that only took commands.
        self._last_step = step
        self._iteration_tokens.observe(step.num_tokens)
        self._step_host.observe(step.host_seconds)
        self._step_device.observe(step.device_seconds)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry)
        return family.labels(self._model)


class _EngineCollector(Collector):
    """Reads the engine's own counts at the time of the scrape: nothing is counted twice."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        model = [self._engine.engine.model_name]
        for name, text, value in (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests waiting to be scheduled.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of the KV pages in use; 1 is all of them.", stats.kv_usage),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric(model, value)
            yield gauge
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("num_preemptions", "Preemptions.", stats.num_preemptions),
            ("recompilations", "Compilations after the warm-up.", stats.recompilations),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric(model, value)
            yield counter
        yield self._cache_config()

    def _cache_config(self) -> Metric:
        config, stats = self._engine.engine.config, self._engine.stats()
        labels = {
            "model_name": self._engine.engine.model_name,
            "block_size": str(stats.block_size),
            "num_gpu_blocks": str(stats.num_blocks),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.memory_utilization or DEFAULT_UTILIZATION),
        }
        info = GaugeMetricFamily(PREFIX + "cache_config_info", "The KV cache's configuration.", labels=list(labels))
        info.add_metric(list(labels.values()), 1)
        return info
