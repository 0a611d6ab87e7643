"""vLLM's lines and keys."""

from __future__ import annotations

import json
import math

import pytest

from jaxkv.bench.events import Outcome
from jaxkv.bench.load import arrival_times
from jaxkv.bench.report import Conditions, details, percentile, report_lines, summarize

CONDITIONS = Conditions("http://x", "/v1/completions", "m", 3, float("inf"), 2)
OUTCOMES = [
    Outcome(prompt_tokens=10, output_tokens=5, ttft=0.1, itl=[0.1, 0.3], latency=0.5),
    Outcome(prompt_tokens=10, output_tokens=3, ttft=0.3, itl=[0.2], latency=0.7),
    Outcome(error="HTTP 503: full"),
]


def test_the_numbers() -> None:
    result = summarize(CONDITIONS, OUTCOMES, 2.0)
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 8)
    assert (result["request_throughput"], result["output_throughput"], result["total_token_throughput"]) == (1, 4, 14)
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["median_itl_ms"] == pytest.approx(200)
    assert result["mean_tpot_ms"] == pytest.approx((100 + 200) / 2)
    assert result["p99_e2el_ms"] == pytest.approx(698)
    json.dumps(result | details(OUTCOMES), allow_nan=False)


def test_the_lines() -> None:
    lines = report_lines(summarize(CONDITIONS, OUTCOMES, 2.0))
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert "Successful requests:                     2" in lines
    assert "Maximum request concurrency:             2" in lines
    assert "Output token throughput (tok/s):         4.00" in lines
    assert "Median TTFT (ms):                        200.00" in lines
    assert "---------------Time to First Token----------------" in lines


def test_a_run_without_a_second_token_has_zeros_not_nan() -> None:
    result = summarize(CONDITIONS, [Outcome(prompt_tokens=1, output_tokens=1, ttft=0.1, latency=0.1)], 1.0)
    assert result["mean_tpot_ms"] == result["p99_itl_ms"] == 0.0


def test_percentiles_are_between_the_nearest_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert percentile([0.0, 1.0], 99) == pytest.approx(0.99)


def test_arrivals_come_at_the_rate_that_was_asked() -> None:
    assert arrival_times(3, math.inf, 0) == [0.0] * 3
    times = arrival_times(5000, 50.0, 0)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(100, rel=0.05)
    assert times == arrival_times(5000, 50.0, 0)
