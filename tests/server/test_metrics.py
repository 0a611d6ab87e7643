"""/metrics: vLLM's names and types, and numbers that add up."""

from __future__ import annotations

import httpx
from fixtures.live_server import live_server
from fixtures.scripted_engine import ScriptedEngine, say
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"}
COUNTERS = {
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "request_success",
    "recompilations",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "step_host_seconds",
    "step_device_seconds",
}


def scrape(url: str) -> dict[str, Metric]:
    response = httpx.get(f"{url}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(response.text)
    return {family.name.removeprefix("jaxkv:"): family for family in families if not family.name.endswith("_created")}


def value(families: dict[str, Metric], family: str, sample: str) -> float:
    return sum(s.value for s in families[family].samples if s.name == f"jaxkv:{sample}")


def test_names_types_and_labels(base_url: str) -> None:
    families = scrape(base_url)
    assert {name for name, family in families.items() if family.type == "gauge"} == GAUGES
    assert {name for name, family in families.items() if family.type == "counter"} == COUNTERS
    assert {name for name, family in families.items() if family.type == "histogram"} == HISTOGRAMS
    for name, family in families.items():
        for sample in family.samples:
            expected = {"model_name", "le", "finished_reason"}
            assert name == "cache_config_info" or set(sample.labels) <= expected, "no label comes from a request"
    labels = families["cache_config_info"].samples[0].labels
    assert labels["block_size"] == "4"
    assert labels["num_gpu_blocks"] == "128"
    assert float(labels["gpu_memory_utilization"]) == 0.9


def test_numbers_add_up_over_requests(base_url: str) -> None:
    before = scrape(base_url)
    body = {"prompt": ["abcd", "efgh"], "max_tokens": 6, "n": 2, "ignore_eos": True, "temperature": 0}
    assert httpx.post(f"{base_url}/v1/completions", json=body).status_code == 200
    after = scrape(base_url)

    def grown(family: str, sample: str) -> float:
        return value(after, family, sample) - value(before, family, sample)

    assert grown("generation_tokens", "generation_tokens_total") == 24
    assert grown("prompt_tokens", "prompt_tokens_total") == 8
    assert grown("request_success", "request_success_total") == 4
    for name in HISTOGRAMS - {"iteration_tokens_total", "step_host_seconds", "step_device_seconds"}:
        count = grown(name, f"{name}_count")
        assert count == (20 if name == "inter_token_latency_seconds" else 2), name
    assert grown("request_generation_tokens", "request_generation_tokens_sum") == 24
    assert grown("request_prompt_tokens", "request_prompt_tokens_sum") == 8
    assert grown("iteration_tokens_total", "iteration_tokens_total_count") >= 6
    assert grown("step_device_seconds", "step_device_seconds_sum") > 0
    assert value(after, "recompilations", "recompilations_total") == 0


def test_what_the_engine_says_is_shown_as_it_is() -> None:
    engine = ScriptedEngine(say("abc"))
    with live_server(engine) as url:
        families = scrape(url)
    assert value(families, "kv_cache_usage_perc", "kv_cache_usage_perc") == 0.25
    assert value(families, "prefix_cache_hits", "prefix_cache_hits_total") == 3
    assert value(families, "num_preemptions", "num_preemptions_total") == 1
