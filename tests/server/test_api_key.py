"""The API key guards every route but /health and /ready."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fixtures.live_server import live_server
from fixtures.scripted_engine import ScriptedEngine

from server.settings import ServerSettings

SETTINGS = ServerSettings(api_key="secret-ключ")
GUARDED = ["/v1/models", "/metrics", "/version", "/openapi.json", "/docs", "/no/such/route"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server(ScriptedEngine(), SETTINGS) as url:
        yield url


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_open_routes_need_no_key(url: str, path: str) -> None:
    assert httpx.get(url + path).status_code == 200


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize(
    "header", [None, "secret-ключ", "Bearer", "Bearer wrong", "Basic secret-ключ", "Bearer secret-ключ2"]
)
def test_guarded_routes_refuse_without_the_right_key(url: str, path: str, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode()}
    response = httpx.get(url + path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_generation_is_guarded_before_its_body_is_read(url: str) -> None:
    assert httpx.post(f"{url}/v1/completions", content=b"{").status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_the_right_key_opens(url: str, scheme: str) -> None:
    headers = {"authorization": f"{scheme} secret-ключ".encode()}
    assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
