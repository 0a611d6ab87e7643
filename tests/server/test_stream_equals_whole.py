"""Whatever a request asks, its stream joined is its whole answer."""

from __future__ import annotations

import functools
from typing import Any

import httpx
from fixtures.sse import read_events
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

COMMON = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24), "seed": st.integers(0, 2**31)},
    optional={
        "temperature": st.sampled_from([0, 0.7, 1.5]),
        "n": st.integers(1, 3),
        "top_k": st.integers(0, 20),
        "stop": st.lists(st.text(st.characters(codec="ascii"), min_size=1, max_size=2), min_size=1, max_size=3),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "prompt_logprobs": st.integers(0, 3),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
    },
)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
COMPLETION = st.fixed_dictionaries(
    {
        "prompt": st.one_of(
            TEXT, st.lists(TEXT, min_size=1, max_size=3), st.lists(st.integers(0, 260), min_size=1, max_size=20)
        )
    },
    optional={"echo": st.booleans(), "logprobs": st.integers(0, 3)},
)
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": TEXT}), min_size=1, max_size=2)},
    optional={"logprobs": st.booleans()},
)
PROPERTY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@PROPERTY
@given(body=COMPLETION, common=COMMON)
def test_completions(client: httpx.Client, body: dict[str, Any], common: dict[str, Any]) -> None:
    whole, chunks = both(client, "/v1/completions", common | body)
    choices: dict[int, dict[str, Any]] = {}
    for part in (choice for chunk in chunks for choice in chunk["choices"]):
        joined = choices.setdefault(part["index"], {"text": "", "logprobs": None})
        assert joined.get("finish_reason") is None, "nothing follows the end"
        joined["text"] += part["text"]
        if part["logprobs"] is not None:
            lists = joined["logprobs"] = joined["logprobs"] or {name: [] for name in part["logprobs"]}
            for name, values in part["logprobs"].items():
                lists[name] += values
        joined |= {name: value for name, value in part.items() if name not in ("text", "logprobs")}
    assert [choices[index] for index in sorted(choices)] == whole["choices"]


@PROPERTY
@given(body=CHAT, common=COMMON)
def test_chat(client: httpx.Client, body: dict[str, Any], common: dict[str, Any]) -> None:
    whole, chunks = both(client, "/v1/chat/completions", common | body)
    choices: dict[int, dict[str, Any]] = {}
    for part in (choice for chunk in chunks for choice in chunk["choices"]):
        if part["index"] not in choices:
            assert part["delta"] == {"role": "assistant", "content": ""}
        message = {"role": "assistant", "content": ""}
        joined = choices.setdefault(part["index"], {"message": message, "logprobs": None, "index": part["index"]})
        assert joined.get("finish_reason") is None, "nothing follows the end"
        joined["message"]["content"] += part["delta"].get("content", "")
        if part["logprobs"] is not None:
            content = joined["logprobs"] = joined["logprobs"] or {"content": []}
            content["content"] += part["logprobs"]["content"]
        joined |= {"finish_reason": part["finish_reason"], "stop_reason": part["stop_reason"]}
    assert [choices[index] for index in sorted(choices)] == whole["choices"]
    scored = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
    assert scored == ([whole["prompt_logprobs"]] if "prompt_logprobs" in whole else [])


def both(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer and the chunks of the stream, checked for what they share beside the choices."""
    whole = client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    streamed = client.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = read_events(streamed.content)
    assert len({chunk["id"] for chunk in chunks}) == 1
    *others, last = chunks
    assert last["choices"] == []
    assert all(chunk["usage"] is None for chunk in others)
    # What is cached depends on who came before; the rest of the usage does not.
    for usage in (last["usage"], answer["usage"]):
        usage.pop("prompt_tokens_details")
    assert last["usage"] == answer["usage"]
    return close(answer), close(others)


@functools.singledispatch
def close(value: Any) -> Any:
    """Log-probabilities may differ in their last digits between a cold and a cached prompt."""
    return value


@close.register
def _(value: float) -> float:
    return round(value, 3)


@close.register
def _(value: list) -> list:  # type: ignore[type-arg]
    return [close(item) for item in value]


@close.register
def _(value: dict) -> dict:  # type: ignore[type-arg]
    return {name: close(item) for name, item in value.items()}
