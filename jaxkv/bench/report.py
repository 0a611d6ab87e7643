"""The numbers of a benchmark: the lines that people of `vllm bench serve` know, and the same as JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.bench.events import Outcome

_WIDTH = 50
_LABELS = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What was measured."""

    base_url: str
    endpoint: str
    model: str
    num_prompts: int
    request_rate: float
    max_concurrency: int | None


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks; 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(conditions: Conditions, outcomes: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """All numbers under vLLM's JSON keys; times in milliseconds where the key says so, else seconds."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    total_input = sum(outcome.prompt_tokens for outcome in good)
    total_output = sum(outcome.output_tokens for outcome in good)
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if "chat" in conditions.endpoint else "openai",
        "base_url": conditions.base_url,
        "model_id": conditions.model,
        "num_prompts": conditions.num_prompts,
        # JSON has no infinity.
        "request_rate": "inf" if conditions.request_rate == float("inf") else conditions.request_rate,
        "max_concurrency": conditions.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration,
        "output_throughput": total_output / duration,
        "total_token_throughput": (total_input + total_output) / duration,
    }
    series = {
        "ttft": [outcome.ttft for outcome in good],
        "tpot": [tpot for outcome in good if (tpot := outcome.tpot) is not None],
        "itl": [gap for outcome in good for gap in outcome.itl],
        "e2el": [outcome.latency for outcome in good],
    }
    for name, values in series.items():
        result[f"mean_{name}_ms"] = 1000 * statistics.fmean(values) if values else 0.0
        result[f"median_{name}_ms"] = 1000 * percentile(values, 50)
        result[f"std_{name}_ms"] = 1000 * statistics.pstdev(values) if values else 0.0
        result[f"p99_{name}_ms"] = 1000 * percentile(values, 99)
    return result


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What only a saved result has room for: each request by itself."""
    return {
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itl for outcome in outcomes],
        "errors": [outcome.error or "" for outcome in outcomes],
    }


def report_lines(result: dict[str, Any]) -> list[str]:
    lines = [_title(" Serving Benchmark Result ", "=")]
    lines.append(_line("Successful requests:", result["completed"]))
    lines.append(_line("Failed requests:", result["failed"]))
    if result["max_concurrency"] is not None:
        lines.append(_line("Maximum request concurrency:", result["max_concurrency"]))
    if result["request_rate"] != "inf":
        lines.append(_line("Request rate configured (RPS):", result["request_rate"]))
    for label, key in (
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Total Token throughput (tok/s):", "total_token_throughput"),
    ):
        lines.append(_line(label, result[key]))
    for name, short, long in _LABELS:
        lines.append(_title(long, "-"))
        for kind, key in (("Mean", "mean"), ("Median", "median"), ("P99", "p99")):
            lines.append(_line(f"{kind} {short} (ms):", result[f"{key}_{name}_ms"]))
    lines.append("=" * _WIDTH)
    return lines


def _title(text: str, fill: str) -> str:
    return f"{text:{fill}^{_WIDTH}}"


def _line(label: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}".rstrip()
