"""The official client, synchronous and asynchronous, against a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from fixtures.live_server import live_server
from fixtures.scripted_engine import ScriptedEngine, fault_after

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def sdk(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["tiny"]
    assert sdk.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="the model 'other/name' does not exist"):
        sdk.models.retrieve("other/name")


def test_completions_with_logprobs(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="tiny", prompt="hello", max_tokens=5, temperature=0, logprobs=2, echo=True)
    assert answer.choices[0].text.startswith("hello")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


def test_chat_with_logprobs(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-5)


def test_streams_join_to_the_whole_and_bring_the_usage(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(model="tiny", messages=CHAT, max_tokens=20, temperature=0)
    chunks = list(
        sdk.chat.completions.create(
            model="tiny",
            messages=CHAT,
            max_tokens=20,
            temperature=0,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    entries = [
        entry for c in chunks if c.choices and c.choices[0].logprobs for entry in c.choices[0].logprobs.content or []
    ]
    assert len(entries) == whole.usage.completion_tokens


def test_the_asynchronous_client(base_url: str) -> None:
    async def ask() -> tuple[str, str, str]:
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as sdk:
            whole, chat, stream = await asyncio.gather(
                sdk.completions.create(model="tiny", prompt="async", max_tokens=12, temperature=0),
                sdk.chat.completions.create(model="tiny", messages=CHAT, max_tokens=12, temperature=0),
                sdk.completions.create(model="tiny", prompt="async", max_tokens=12, temperature=0, stream=True),
            )
            joined = "".join([chunk.choices[0].text async for chunk in stream])
            return whole.choices[0].text, joined, chat.choices[0].message.content or ""

    whole, joined, _ = asyncio.run(ask())
    assert whole == joined


def test_errors_arrive_as_the_clients_own(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(model="tiny", prompt="x", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        sdk.completions.create(model="tiny", prompt="x" * 300)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        sdk.chat.completions.create(model="gpt-9", messages=CHAT)


def test_a_fault_in_mid_stream_raises_in_the_client() -> None:
    with live_server(ScriptedEngine(fault_after(2))) as url:
        sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with sdk, pytest.raises(openai.APIError, match="produced a NaN"):
            for _ in sdk.completions.create(model="scripted", prompt="x", stream=True):
                pass
