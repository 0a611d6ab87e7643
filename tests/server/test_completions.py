"""/v1/completions on a real engine: prompts, choices, echo, scoring, log-probabilities, usage."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

GREEDY = {"temperature": 0, "ignore_eos": True}


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=GREEDY | {"max_tokens": 8} | body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_the_shape_of_an_answer(client: httpx.Client) -> None:
    answer = complete(client, prompt="hello", model="tiny")
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 8, 13)


def test_openais_default_of_16_tokens_and_null_for_as_much_as_fits(client: httpx.Client) -> None:
    default = client.post("/v1/completions", json=GREEDY | {"prompt": "hello"}).json()
    assert default["usage"]["completion_tokens"] == 16
    unlimited = client.post("/v1/completions", json=GREEDY | {"prompt": "h" * 200, "max_tokens": None}).json()
    assert unlimited["usage"]["total_tokens"] == 256


def test_many_prompts_with_many_choices_are_numbered_prompt_by_prompt(client: httpx.Client) -> None:
    alone = [complete(client, prompt=prompt)["choices"][0]["text"] for prompt in ("one", "two")]
    answer = complete(client, prompt=["one", "two"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [alone[0], alone[0], alone[1], alone[1]]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 32


def test_ids_and_their_text_are_the_same_prompt(client: httpx.Client) -> None:
    text = complete(client, prompt="hi there")["choices"][0]["text"]
    ids = list(b"hi there")
    assert complete(client, prompt=ids)["choices"][0]["text"] == text
    assert [choice["text"] for choice in complete(client, prompt=[ids, ids])["choices"]] == [text, text]


def test_cached_tokens_are_told(client: httpx.Client) -> None:
    prompt = "a prompt that nobody else sends: " * 3
    assert complete(client, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert complete(client, prompt=prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] > 80
    salted = complete(client, prompt=prompt, cache_salt="mine")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_echo_puts_the_prompt_before_the_answer(client: httpx.Client) -> None:
    text = complete(client, prompt="héllo")["choices"][0]["text"]
    assert complete(client, prompt="héllo", echo=True)["choices"][0]["text"] == "héllo" + text
    assert complete(client, prompt=list("héllo".encode()), echo=True)["choices"][0]["text"] == "héllo" + text


@pytest.mark.parametrize("prompt", ["héllo", list("héllo".encode())])
def test_scoring_without_an_answer(client: httpx.Client, prompt: Any) -> None:
    (choice,) = complete(client, prompt=prompt, echo=True, max_tokens=0, logprobs=2)["choices"]
    assert choice["text"] == "héllo"
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "l", "l", "o"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["top_logprobs"][0] is None
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])


def test_scoring_needs_no_logprobs(client: httpx.Client) -> None:
    (choice,) = complete(client, prompt="abc", echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("abc", None)


def test_logprobs_of_the_answer_and_of_the_echoed_prompt_fit_together(client: httpx.Client) -> None:
    (choice,) = complete(client, prompt="abc", echo=True, logprobs=0)["choices"]
    logprobs = choice["logprobs"]
    assert [len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [11] * 4
    (alone,) = complete(client, prompt="abc", logprobs=0)["choices"]
    assert logprobs["tokens"][3:] == alone["logprobs"]["tokens"]
    assert logprobs["token_logprobs"][3:] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)
    assert logprobs["text_offset"][3:] == [offset + 3 for offset in alone["logprobs"]["text_offset"]]


def test_offsets_point_at_the_tokens_in_the_text(client: httpx.Client) -> None:
    (choice,) = complete(client, prompt="abc", logprobs=1, max_tokens=40)["choices"]
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<", "token_id:")):
            assert choice["text"].startswith(token, offset)


def test_prompt_logprobs_by_token_id(client: httpx.Client) -> None:
    (choice,) = complete(client, prompt="abc", prompt_logprobs=3, max_tokens=1)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, row in zip(b"bc", others, strict=True):
        assert 3 <= len(row) <= 4
        assert row[str(token)]["decoded_token"] == chr(token)
        ranks = sorted(entry["rank"] for entry in row.values())
        assert ranks[:3] == [1, 2, 3]


def test_stop_strings_and_ids(client: httpx.Client) -> None:
    text = complete(client, prompt="stop here", max_tokens=30)["choices"][0]["text"]
    mark = text[4:6]
    (choice,) = complete(client, prompt="stop here", max_tokens=30, stop=mark)["choices"]
    assert choice["text"] == text[: text.index(mark)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", mark)
    (choice,) = complete(client, prompt="stop here", max_tokens=30, stop=[mark], include_stop_str_in_output=True)[
        "choices"
    ]
    assert choice["text"] == text[: text.index(mark) + len(mark)]


def test_the_same_seed_gives_the_same_answer(client: httpx.Client) -> None:
    def texts(**more: Any) -> list[str]:
        answer = complete(client, prompt="roll", temperature=1.5, n=3, max_tokens=12, **more)
        return [choice["text"] for choice in answer["choices"]]

    assert texts(seed=5) == texts(seed=5)
    assert texts(seed=5) != texts(seed=6)
    assert len(set(texts(seed=5))) > 1
    assert texts() != texts()


def test_tokenize_and_detokenize(client: httpx.Client) -> None:
    body = client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert body["tokens"] == list("héllo".encode())
    assert (body["count"], body["max_model_len"], body["token_strs"][0]) == (6, 256, "h")
    assert client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "héllo"}
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert (
        client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"].startswith("<|im_start|>user\nx")
    )
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert client.post("/tokenize", json={}).status_code == 400
    assert client.post("/detokenize", json={"tokens": [261]}).json()["error"]["param"] == "tokens"
