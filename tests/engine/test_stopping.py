"""How a choice ends: stop ids, stop strings, lengths, minimum lengths."""

from __future__ import annotations

import itertools

import pytest
from fixtures.byte_tokenizer import EOS

from jaxkv import Engine, SamplingParams


def free_run(engine: Engine, prompt: str, count: int) -> list[int]:
    """The tokens that the model writes when nothing stops it."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return engine.generate(prompt, params)[0].outputs[0].token_ids


def test_end_of_sequence(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, logit_bias={EOS: 100.0})
    choice = engine.generate("abc", params)[0].outputs[0]
    assert (choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason) == ([EOS], "", "stop", None)


def test_min_tokens_holds_back_every_stop_id(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, min_tokens=4, logit_bias={EOS: 100.0})
    ids = engine.generate("abc", params)[0].outputs[0].token_ids
    assert len(ids) == 5
    assert ids[-1] == EOS
    assert EOS not in ids[:-1]


def test_ignore_eos(engine: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logit_bias={EOS: 100.0})
    choice = engine.generate("abc", params)[0].outputs[0]
    assert choice.token_ids == [EOS] * 5
    assert choice.finish_reason == "length"
    assert choice.text == ""
    shown = SamplingParams(**{**_fields(params), "skip_special_tokens": False})
    assert engine.generate("abc", shown)[0].outputs[0].text == "</s>" * 5


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_ids(engine: Engine, include: bool) -> None:
    ids = free_run(engine, "stop me", 12)
    target = next(t for t in ids[2:] if t < 128 and t not in ids[:2])
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(target,), include_stop_str_in_output=include
    )
    choice = engine.generate("stop me", params)[0].outputs[0]
    assert choice.token_ids == ids[: ids.index(target) + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", target)
    assert choice.text.endswith(chr(target)) is include


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_in_stream_and_whole(engine: Engine, include: bool) -> None:
    base = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    text = engine.generate("write", base)[0].outputs[0].text
    for start, length in itertools.product((0, 1, 5), (1, 2, 4)):
        stop = text[start : start + length]
        params = SamplingParams(**{**_fields(base), "stop": (stop,), "include_stop_str_in_output": include})
        choice = engine.generate("write", params)[0].outputs[0]
        end = text.index(stop) + (len(stop) if include else 0)
        assert choice.text == text[:end]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert "".join(d.choices[0].text for d in engine.stream("write", params)) == text[:end]


def test_length(engine: Engine) -> None:
    choice = engine.generate("abc", SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))[0].outputs[0]
    assert (len(choice.token_ids), choice.finish_reason) == (3, "length")


def test_scoring_generates_nothing(engine: Engine) -> None:
    output = engine.generate("score me", SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 8
    assert output.prompt_logprobs[0] is None


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}
