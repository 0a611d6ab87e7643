"""No request body gives a 500, invalid JSON, or an error that does not name itself."""

from __future__ import annotations

import json

import httpx
import pytest
from fixtures.sse import read_events, strict_json

GENERATION = ("/v1/completions", "/v1/chat/completions")
CHAT = [{"role": "user", "content": "hi"}]

MALFORMED = [
    b"",
    b"{",
    b"nul",
    b"[]",
    b'"text"',
    b"null",
    b"5",
    b'{"prompt": "x"}{',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "a\x00b"}',
    b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"x": ' + b'{"x":' * 50_000 + b"1" + b"}" * 50_001,
    b"\x1f\x8b\x08\x00",
]

WRONG = [
    ("prompt", 5),
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", [[]]),
    ("prompt", [1, "a"]),
    ("prompt", ["a", 1]),
    ("prompt", [True]),
    ("prompt", [1.0]),
    ("prompt", [-1]),
    ("prompt", [10**12]),
    ("prompt", [260, 261]),
    ("prompt", [[1], "a"]),
    ("prompt", {"text": "x"}),
    ("prompt", ["x"] * 2049),
    ("prompt", [True] * 2_000_000),
    ("max_tokens", "5"),
    ("max_tokens", 5.0),
    ("max_tokens", True),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 2**31),
    ("max_tokens", 10**30),
    ("n", 0),
    ("n", 129),
    ("temperature", "0.5"),
    ("temperature", -0.1),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("seed", 2**63),
    ("seed", "a"),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"261": 1}),
    ("logit_bias", [1]),
    ("logit_bias", {"1": "1"}),
    ("logit_bias", {"1": True}),
    ("logit_bias", {str(i): 1 for i in range(2000)}),
    ("stop", ""),
    ("stop", [""]),
    ("stop", 5),
    ("stop", [1]),
    ("stop", ["x"] * 65),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [261]),
    ("stop_token_ids", list(range(65))),
    ("min_tokens", 99),
    ("ignore_eos", 1),
    ("ignore_eos", "true"),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("stream_options", 5),
    ("cache_salt", ""),
    ("cache_salt", "x" * 1025),
    ("priority", 1.5),
    ("priority", 2**64),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("prompt_logprobs", 21),
    ("echo", "yes"),
    ("best_of", 1),
    ("suffix", "x"),
    ("response_format", {"type": "json_object"}),
    ("model", 5),
]

WRONG_CHAT = [
    ("messages", None),
    ("messages", []),
    ("messages", "hi"),
    ("messages", ["hi"]),
    ("messages", [{}]),
    ("messages", [{"role": "user"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "emperor", "content": "x"}]),
    ("messages", [{"role": 5, "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": ["x"]}]),
    ("messages", [5] * 2_000_000),
    ("top_logprobs", 3),
    ("logprobs", 3),
    ("max_completion_tokens", "5"),
    ("tools", [{"type": "function"}]),
    ("chat_template_kwargs", [1]),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"add_generation_prompt": False}),
    ("add_generation_prompt", "yes"),
]


def assert_refused(response: httpx.Response, status: int = 400) -> dict[str, object]:
    assert response.status_code == status, response.text[:500]
    assert response.headers["content-type"] == "application/json"
    body = strict_json(response.content)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert len(body["error"]["message"]) < 1000
    return dict(body["error"])


@pytest.mark.parametrize("path", [*GENERATION, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("content", MALFORMED, ids=lambda content: repr(content[:20]))
def test_malformed_json_is_refused(client: httpx.Client, path: str, content: bytes) -> None:
    assert_refused(client.post(path, content=content, headers={"content-type": "application/json"}))


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value)[:30])
def test_wrong_values_are_refused_by_name(client: httpx.Client, name: str, value: object) -> None:
    response = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4} | {name: value})
    assert assert_refused(response)["param"] == name


@pytest.mark.parametrize(("name", "value"), WRONG_CHAT, ids=lambda value: repr(value)[:30])
def test_wrong_chat_values_are_refused_by_name(client: httpx.Client, name: str, value: object) -> None:
    response = client.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 4} | {name: value})
    assert assert_refused(response)["param"] == name


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "max_tokens", "seed"])
def test_numbers_that_are_none_are_refused(client: httpx.Client, name: str, number: str) -> None:
    content = f'{{"prompt": "x", "{name}": {number}}}'
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert assert_refused(response)["param"] == name


@pytest.mark.parametrize("number", ["NaN", "1e400"])
def test_odd_numbers_in_ignored_fields_do_no_harm(client: httpx.Client, number: str) -> None:
    content = f'{{"prompt": "x", "max_tokens": 1, "extra": {number}}}'
    response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200
    strict_json(response.content)


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_a_missing_field_is_named(client: httpx.Client, name: str) -> None:
    path = "/v1/completions" if name == "prompt" else "/v1/chat/completions"
    error = assert_refused(client.post(path, json={"max_tokens": 4}))
    assert error["param"] == name
    assert error["message"] == f"{name} is missing"


def test_max_completion_tokens_is_spelled_as_the_client_did(client: httpx.Client) -> None:
    body = {"messages": CHAT, "max_completion_tokens": 0}
    assert assert_refused(client.post("/v1/chat/completions", json=body))["param"] == "max_completion_tokens"


def test_ten_megabytes_are_refused_with_the_numbers(client: httpx.Client) -> None:
    for text in ("word " * 2_000_000, "a" * 10_000_000, "\u00e9" * 5_000_000, " " * 10_000_000):
        error = assert_refused(client.post("/v1/completions", json={"prompt": text}))
        assert error["param"] == "prompt"


def test_a_body_above_the_limit_is_refused(client: httpx.Client) -> None:
    assert_refused(client.post("/v1/completions", json={"prompt": "x" * (33 * 2**20)}), 413)


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers(client: httpx.Client) -> None:
    error = assert_refused(client.post("/v1/completions", json={"prompt": "x" * 300, "max_tokens": 4}))
    assert error["code"] == "context_length_exceeded"
    assert "300" in str(error["message"])
    assert "256" in str(error["message"])


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
def test_other_content_types_are_refused(client: httpx.Client, content_type: str) -> None:
    response = client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": content_type})
    assert assert_refused(response, 415)["type"] == "UnsupportedMediaTypeError"


def test_an_unknown_model_is_not_found(client: httpx.Client) -> None:
    error = assert_refused(client.post("/v1/completions", json={"prompt": "x", "model": "gpt-9"}), 404)
    assert error["type"] == "NotFoundError"
    assert "gpt-9" in str(error["message"])


def test_unknown_routes_and_methods(client: httpx.Client) -> None:
    assert_refused(client.get("/v2/nothing"), 404)
    assert_refused(client.get("/v1/completions/"), 404)
    assert_refused(client.get("/v1/completions"), 405)
    assert_refused(client.request("PUT", "/health"), 405)


def test_unknown_fields_are_ignored_and_logged_once(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxkv.server")
    body = {"prompt": "x", "max_tokens": 1, "user": "me", "foo\nbar": {"deep": [1]}}
    assert client.post("/v1/completions", json=body).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "unknown fields" in record.getMessage()]
    assert lines == ["/v1/completions: ignored unknown fields 'foo\\nbar', 'user'"]


def test_bad_bodies_leave_other_streams_as_they_were(client: httpx.Client, base_url: str) -> None:
    body = {"prompt": "stay", "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}
    undisturbed = client.post("/v1/completions", json=body).content
    bad = [json.dumps({"prompt": "x", name: value}).encode() for name, value in WRONG[:60]]
    with (
        httpx.Client(base_url=base_url, timeout=60) as other,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        for content in [*MALFORMED, *bad]:
            other.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        disturbed = stream.read()
    assert _texts(disturbed) == _texts(undisturbed)


def _texts(body: bytes) -> list[str]:
    return [chunk["choices"][0]["text"] for chunk in read_events(body)]


def test_a_hopeless_prompt_is_refused_with_a_bound_that_says_so(client: httpx.Client) -> None:
    """It is not encoded: all that is known is a least number of tokens."""
    error = assert_refused(client.post("/v1/completions", json={"prompt": "x" * 10_000}))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "at least 834 tokens, by its 10000 characters, but the model's context is 256" in str(error["message"])
