"""What once broke the engine, or would break a careless one: each case with the right outcome."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from typing import Any

import numpy as np
import pytest
from fixtures.tiny_engine import TINY, tiny_engine

from jaxkv import AsyncEngine, ConfigError, Engine, EngineConfig, EngineStoppedError, RequestError, SamplingParams
from jaxkv.engine import choice as choice_module

LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


@pytest.mark.parametrize("option", [{"cache_salt": b"a"}, {"cache_salt": ["a"]}, {"cache_salt": 5}, {"request_id": 5}])
def test_options_of_a_wrong_type(engine: Engine, option: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        engine.add_request("a", SHORT, **option)
    assert not engine.has_unfinished


@pytest.mark.parametrize("prompt", [None, 5, object(), b"abc", {1, 2}, {"messages": [], 5: 1}])
def test_prompts_of_a_wrong_type(engine: Engine, prompt: Any) -> None:
    with pytest.raises(RequestError):
        engine.generate(prompt, SHORT)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 10**400}, {"seed": 10**5000}, {"max_tokens": 10**5000}, {"logit_bias": None}, {"logit_bias": [1]},
     {"stop": None}, {"stop": 5}, {"stop_token_ids": 5}, {"logit_bias": {1: 10**400}}],
)  # fmt: skip
def test_numbers_and_types_beyond_all_bounds(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**fields)
    assert refused.value.param == next(iter(fields))
    assert len(str(refused.value)) < 200


def test_numpy_numbers_are_numbers(engine: Engine) -> None:
    params = SamplingParams(
        temperature=np.float32(0.0), max_tokens=np.int64(3), seed=np.int32(5), stop_token_ids=np.arange(3).tolist()
    )
    assert isinstance(params.max_tokens, int)
    ids = [np.int32(token) for token in (104, 105)]
    assert engine.generate(ids, params)[0].prompt_token_ids == [104, 105]


@pytest.mark.parametrize("field", ["block_size", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"])
@pytest.mark.parametrize("value", [4.0, True, "4", 0])
def test_engine_sizes_of_a_wrong_type(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(model="x", **{field: value})


def test_a_stream_that_is_dropped_before_it_starts(engine: Engine) -> None:
    engine.stream("hello", LONG).close()
    assert not engine.unfinished
    stream = engine.stream("hello", LONG)
    del stream
    gc.collect()
    assert not engine.unfinished


def test_streams_side_by_side(engine: Engine) -> None:
    first, second = engine.stream("abc", LONG), engine.stream("xyz", SHORT)
    next(second)
    assert sum(len(delta.choices[0].token_ids) for delta in first) == 30
    second.close()
    assert not engine.has_unfinished


def test_a_stream_whose_deltas_others_took(engine: Engine) -> None:
    stream = engine.stream("abc", LONG)
    next(stream)
    while engine.has_unfinished:
        engine.step()
    with pytest.raises(RuntimeError, match="taken by another reader"):
        list(stream)
    stream.close()


@pytest.mark.parametrize("top_p", [1e-38, 5e-324])
def test_the_smallest_nucleus_is_the_best_token(engine: Engine, top_p: float) -> None:
    greedy = engine.generate("hello", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0]
    drawn = engine.generate("hello", SamplingParams(top_p=top_p, seed=1, max_tokens=4, ignore_eos=True))[0]
    assert drawn.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_the_hottest_temperature_keeps_the_order(engine: Engine) -> None:
    greedy = engine.generate("hello", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))[0]
    hot = engine.generate("hello", SamplingParams(temperature=1e300, top_k=1, seed=1, max_tokens=4, ignore_eos=True))[0]
    assert hot.outputs[0].token_ids == greedy.outputs[0].token_ids


def test_damaged_weights_show_in_scoring_too() -> None:
    engine = tiny_engine(
        model=TINY, max_num_batched_tokens=16, attention_backend="reference"
    )  # whose weights are not packed
    layers = engine._runner._params["layers"]
    layers["down"] = layers["down"].at[0, 0, 0].set(np.nan)
    output = engine.generate("hello", SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
    assert output.outputs[0].finish_reason == "error"
    engine.check()


@pytest.mark.parametrize("tokens", [0, 1])
def test_infinite_logits_of_a_prompt_are_not_reported(tokens: int) -> None:
    """Those of its inner tokens alone: the last one's may be fine, by the sign of one number."""
    engine = tiny_engine(model=dataclasses.replace(TINY, tie_embeddings=False), attention_backend="reference")
    weights = engine._runner._params
    weights["lm_head"] = weights["lm_head"].at[77, 3].set(np.inf)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, prompt_logprobs=1)
    prompts = [[(7 * a + b) % 90 + 3 for b in range(20)] for a in range(6)]
    for output in engine.generate(prompts, params, progress=False):
        assert output.outputs[0].finish_reason == "error"
        assert not output.outputs[0].token_ids
    assert engine.stats().generation_tokens == 0
    engine.check()


def test_a_fault_in_reporting_a_fault(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def boom(*_: object) -> str:
        raise ValueError("boom")

    with monkeypatch.context() as patch:
        for method in ("push", "finish"):
            patch.setattr(choice_module.IncrementalDetokenizer, method, boom)
        outputs = engine.generate(["abc", "abd"], SHORT, progress=False)
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}


def test_an_interrupt_leaves_a_whole_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = engine.generate("abcd", LONG)[0].outputs

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    engine.add_request("other", LONG)
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "seat", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.generate("abcd", LONG)[0].outputs == healthy


def test_after_an_interrupt_the_next_step_tells_the_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    name = engine.add_request("abcd", LONG)
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    [delta] = engine.step()
    assert (delta.request_id, delta.finished) == (name, True)
    assert not engine.has_unfinished


def test_an_abort_from_outside_ends_the_stream(shared_engine: Engine) -> None:
    served = AsyncEngine(shared_engine)
    served.start()

    async def read() -> list[str | None]:
        stream = served.submit(await served.prepare("hi", LONG))
        await anext(stream)
        served.abort(stream.request.request_id)
        rest = [delta async for delta in stream]
        return [choice.finish_reason for choice in rest[-1].choices]

    assert asyncio.run(asyncio.wait_for(read(), 20)) == ["abort"]
    served.shutdown()


def test_a_listener_that_kills_the_loop_is_noticed(shared_engine: Engine) -> None:
    class Panic(BaseException):
        pass

    def panic(*_: object) -> None:
        raise Panic

    served = AsyncEngine(shared_engine)
    served.on_step.append(panic)
    served.start()

    async def read() -> None:
        stream = served.submit(await served.prepare("hi", LONG))
        with pytest.raises(EngineStoppedError):
            [delta async for delta in stream]
        with pytest.raises(EngineStoppedError):
            served.submit(await served.prepare("hi", LONG))

    asyncio.run(asyncio.wait_for(read(), 20))
    served.shutdown()
    for request_id in shared_engine.unfinished:
        shared_engine.discard(request_id)


def test_more_choices_than_can_ever_queue(shared_engine: Engine) -> None:
    import dataclasses

    config = shared_engine.config
    shared_engine.config = dataclasses.replace(config, max_queued_requests=2)
    served = AsyncEngine(shared_engine)

    async def submit() -> None:
        with pytest.raises(RequestError, match="at most 10 sequences") as refused:
            served.submit(await served.prepare("hi", SamplingParams(n=11, max_tokens=2)))
        assert refused.value.param == "n"

    asyncio.run(submit())
    shared_engine.config = config
