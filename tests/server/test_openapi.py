"""The OpenAPI page is true: whatever it allows is served, whatever is sent gets an answer that it describes."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from fixtures.live_server import live_server
from fixtures.sse import strict_json
from fixtures.tiny_engine import tiny_engine
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from jaxkv.engine.async_engine import AsyncEngine
from server.app import create_app
from server.settings import ServerSettings
from server.state import ServerState

schema = schemathesis.openapi.from_dict(create_app(ServerState(ServerSettings())).openapi())
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def short_engine() -> AsyncEngine:
    """A context of 48 bytes: even 128 choices as long as they may be are done in a moment."""
    return AsyncEngine(tiny_engine(max_model_len=48))


@pytest.fixture(scope="module")
def short_url(short_engine: AsyncEngine) -> Iterator[str]:
    with live_server(short_engine) as url:
        yield url
    short_engine.shutdown()


def keep_small(case: schemathesis.Case) -> None:
    """2,048 prompts of 128 choices each are allowed, but take minutes."""
    if isinstance(case.body, dict):
        if isinstance(case.body.get("prompt"), list):
            case.body["prompt"] = case.body["prompt"][:8]
        if case.body.get("n") in range(5, 129):
            case.body["n"] = 4


@schema.parametrize()
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_route_answers_as_its_page_says(case: schemathesis.Case, short_url: str) -> None:
    keep_small(case)
    response = case.call(base_url=short_url)
    case.validate_response(response, checks=CHECKS)
    if response.headers["content-type"][0].startswith("application/json"):
        strict_json(response.content)


def test_afterwards_the_engine_is_whole_and_idle(short_engine: AsyncEngine, short_url: str) -> None:
    assert httpx.post(f"{short_url}/v1/completions", json={"prompt": "x"}).status_code == 200
    short_engine.engine.check()
    stats = short_engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_held, stats.recompilations) == (0, 0, 0, 0)


def test_the_page_describes_every_parameter(short_url: str) -> None:
    page = httpx.get(f"{short_url}/openapi.json").json()
    operation = page["paths"]["/v1/completions"]["post"]
    assert "422" not in operation["responses"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/CompletionRequest")
    properties = page["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "temperature", "logit_bias", "cache_salt", "min_p", "echo"} <= set(properties)
