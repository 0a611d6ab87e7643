"""What is asked: random prompts of an exact number of tokens."""

from __future__ import annotations

import random
from typing import Any

from jaxkv.bench.http_client import HttpClient
from jaxkv.core.errors import JaxkvError

CHAT_ENDPOINT = "/v1/chat/completions"
_PROBE_WORDS = 21
_WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he")


class BenchmarkError(JaxkvError):
    """The server cannot be measured as asked."""


def random_ids(count: int, input_len: int, *, vocab: tuple[int, int], seed: int) -> list[list[int]]:
    """Prompts of exactly input_len token ids, drawn from vocab[0] to vocab[1] - 1."""
    rng = random.Random(seed)
    return [[rng.randrange(*vocab) for _ in range(input_len)] for _ in range(count)]


def random_text(num_words: int, rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


def request_body(
    endpoint: str, model: str, prompt: list[int] | str, output_len: int, *, ignore_eos: bool
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint == CHAT_ENDPOINT:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if ignore_eos:
        body["ignore_eos"] = True
    return body


async def make_prompts(
    client: HttpClient, endpoint: str, model: str, count: int, input_len: int, *, vocab: tuple[int, int], seed: int
) -> list[list[int] | str]:
    """Token-id prompts where the server takes them, else texts of input_len tokens by the server's own count.

    Raises BenchmarkError if the server refuses both.
    """
    if endpoint != CHAT_ENDPOINT:
        # One prompt more than is measured: what the probe leaves in a prefix cache must help none of them.
        *ids, probed = random_ids(count + 1, input_len, vocab=vocab, seed=seed)
        answer = await client.post(endpoint, _probe(endpoint, model, probed))
        if answer.status == 200:
            return [*ids]
    return await _text_prompts(client, endpoint, model, count, input_len, seed)


async def _text_prompts(
    client: HttpClient, endpoint: str, model: str, count: int, input_len: int, seed: int
) -> list[list[int] | str]:
    """Common words are mostly one token each. Two probes find what a word and the template really cost."""
    rng = random.Random(seed)

    async def tokens_of(num_words: int) -> int:
        answer = await client.post(endpoint, _probe(endpoint, model, random_text(num_words, rng)))
        if answer.status != 200:
            text = answer.body[:500].decode("utf-8", "replace")
            raise BenchmarkError(f"the server refuses a test request with HTTP {answer.status}: {text}")
        tokens: int = answer.json()["usage"]["prompt_tokens"]
        return tokens

    short, long = await tokens_of(1), await tokens_of(_PROBE_WORDS)
    per_word = (long - short) / (_PROBE_WORDS - 1)
    num_words = round((input_len - short) / per_word) + 1
    if num_words < 1:
        raise BenchmarkError(
            f"--input-len is {input_len}, but a prompt of one word has {short} tokens here: ask for more"
        )
    return [random_text(num_words, rng) for _ in range(count)]


def _probe(endpoint: str, model: str, prompt: list[int] | str) -> dict[str, Any]:
    body = request_body(endpoint, model, prompt, 1, ignore_eos=False)
    del body["stream"], body["stream_options"]
    return body
