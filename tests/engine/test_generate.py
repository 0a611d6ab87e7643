"""Generating through the Python API: prompts of every kind, limits, streams, choices."""

from __future__ import annotations

import pytest
from fixtures.byte_tokenizer import BOS
from fixtures.workload import mixed_jobs

from jaxkv import Engine, RequestError, SamplingParams, join_deltas

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
MAX_LEN = 64


def test_one_prompt_of_each_kind(engine: Engine) -> None:
    text = engine.generate("hello", GREEDY)[0]
    ids = engine.generate([104, 101, 108, 108, 111], GREEDY)[0]
    many = engine.generate(["hello", [104, 101, 108, 108, 111]], GREEDY, progress=False)
    assert text.prompt == "hello"
    assert ids.prompt is None
    assert text.prompt_token_ids == ids.prompt_token_ids == [104, 101, 108, 108, 111]
    assert [o.outputs[0].token_ids for o in many] == [text.outputs[0].token_ids] * 2 == [ids.outputs[0].token_ids] * 2


def test_chats(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    as_list = engine.generate(messages, GREEDY)[0]
    as_dict = engine.generate({"messages": messages}, GREEDY)[0]
    assert as_list.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert as_list.prompt_token_ids[0] == BOS + 2
    assert as_list.outputs == as_dict.outputs
    open_end = {"messages": [*messages, {"role": "assistant", "content": "yes, "}], "continue_final_message": True}
    assert engine.generate(open_end, GREEDY)[0].prompt.endswith("assistant\nyes, ")  # type: ignore[union-attr]


def test_no_prompts_no_outputs(engine: Engine) -> None:
    assert engine.generate([], GREEDY) == []


def test_params_for_each_prompt(engine: Engine) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    outputs = engine.generate(["abc", "abc"], [GREEDY, short], progress=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [8, 2]
    with pytest.raises(RequestError, match="2 prompts came with 1 params"):
        engine.generate(["a", "b"], [GREEDY])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 16, MAX_LEN - 2, MAX_LEN - 1])
def test_prompts_at_block_edges(engine: Engine, length: int) -> None:
    """Cold, then fully or partly cached, then as a strict prefix: the same tokens."""
    ids = [(7 * i + length) % 250 for i in range(length)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=min(6, MAX_LEN - length))
    cold = engine.generate(ids, params)[0]
    warm = engine.generate(ids, params)[0]
    page = engine.config.block_size
    assert page is not None
    assert warm.outputs == cold.outputs
    assert warm.num_cached_tokens >= (length - 1) // page * page
    if length > page:
        shorter = engine.generate(ids[: length // page * page], params)[0]
        again = engine.generate(ids[: length // page * page], params)[0]
        assert shorter.outputs == again.outputs
        assert again.num_cached_tokens == length // page * page - 1


def test_a_fully_cached_prompt_computes_one_token_and_leaves_the_shared_block_alone(engine: Engine) -> None:
    assert engine.config.block_size
    ids = [11 * i % 251 for i in range(2 * engine.config.block_size)]
    engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=1))
    before = engine.read_pages(range(engine.stats().num_blocks))
    cached = {view.block for view in engine.page_map() if view.state == "cached"}
    output = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=1))[0]
    after = engine.read_pages(range(engine.stats().num_blocks))
    assert output.num_cached_tokens == len(ids) - 1
    assert all((before[block] == after[block]).all() for block in cached)


def test_what_can_never_fit_is_refused_and_the_next_one_runs(engine: Engine) -> None:
    for length, max_tokens in ((MAX_LEN, 1), (MAX_LEN + 1, 1), (MAX_LEN, None), (10, MAX_LEN)):
        with pytest.raises(RequestError) as refused:
            engine.generate([5] * length, SamplingParams(max_tokens=max_tokens))
        assert refused.value.code == "context_length_exceeded"
        assert str(MAX_LEN) in str(refused.value)
    fits = engine.generate([5] * (MAX_LEN - 1), SamplingParams(temperature=0.0))[0]
    assert len(fits.outputs[0].token_ids) == 1


def test_a_refused_prompt_in_a_list_runs_nothing(engine: Engine) -> None:
    before = engine.stats().generation_tokens
    with pytest.raises(RequestError):
        engine.generate(["fine", []], GREEDY)
    assert engine.stats().generation_tokens == before
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), ([], "prompt"), ([261], "prompt"), ([-1], "prompt"), ([True], "prompt"), ([1.5], "prompt"),
     ("\ud800", "prompt"), ([{"role": "wizard", "content": "x"}], "messages"), ({"message": []}, "messages"),
     ({"messages": []}, "messages")],
)  # fmt: skip
def test_bad_prompts(engine: Engine, prompt: object, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        engine.add_request(prompt, GREEDY)  # type: ignore[arg-type]
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("params", "param"),
    [({"logit_bias": {261: 1.0}}, "logit_bias"), ({"stop_token_ids": (999,)}, "stop_token_ids"),
     ({"min_tokens": 62}, "min_tokens"), ({"stop_token_ids": tuple(range(63))}, "stop_token_ids")],
)  # fmt: skip
def test_params_beyond_this_model(engine: Engine, params: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        engine.add_request("abc", SamplingParams(**params))  # type: ignore[arg-type]
    assert refused.value.param == param


def test_a_request_id_in_use(engine: Engine) -> None:
    engine.add_request("abc", GREEDY, request_id="mine")
    with pytest.raises(RequestError, match="in use") as refused:
        engine.add_request("abc", GREEDY, request_id="mine")
    assert refused.value.param == "request_id"


def test_stream_equals_generate(engine: Engine) -> None:
    for job in mixed_jobs(12, seed=5):
        whole = engine.generate(job.prompt, job.params)[0]
        joined = join_deltas(engine.stream(job.prompt, job.params), prompt=job.prompt)
        assert [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in joined.outputs] == [
            (c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in whole.outputs
        ]
        assert (joined.prompt_logprobs is None) == (job.params.prompt_logprobs is None)


def test_leaving_a_stream_early_frees_everything(engine: Engine) -> None:
    stream = engine.stream("abcdefgh", SamplingParams(max_tokens=50, ignore_eos=True, n=2))
    next(stream)
    assert engine.stats().num_blocks_held > 0
    stream.close()
    assert engine.stats().num_blocks_held == 0
    assert not engine.has_unfinished


def test_generate_leaves_other_requests_deltas_for_step(engine: Engine) -> None:
    engine.add_request("other", GREEDY, request_id="other")
    engine.generate("mine", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    deltas = []
    while engine.has_unfinished:
        deltas += engine.step()
    assert {delta.request_id for delta in deltas} == {"other"}
    assert len(join_deltas(deltas).outputs[0].token_ids) == 8


def test_choices(engine: Engine) -> None:
    greedy = engine.generate("abc", SamplingParams(temperature=0.0, n=3, max_tokens=6, ignore_eos=True))[0]
    assert len({tuple(c.token_ids) for c in greedy.outputs}) == 1
    drawn = engine.generate("abc", SamplingParams(n=4, seed=1, max_tokens=6, ignore_eos=True))[0]
    assert [c.index for c in drawn.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in drawn.outputs}) > 1
    first = engine.generate("abc", SamplingParams(seed=1, max_tokens=6, ignore_eos=True))[0]
    assert first.outputs[0].token_ids == drawn.outputs[0].token_ids


def test_unseeded_requests_differ(engine: Engine) -> None:
    outputs = engine.generate(
        ["abc"] * 6, SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True), progress=False
    )
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) > 1


def test_priority_goes_first() -> None:
    """Under the priority policy a late request with a lower number overtakes the queue."""
    from fixtures.tiny_engine import tiny_engine

    engine = tiny_engine(num_blocks=32, max_num_seqs=1, max_num_batched_tokens=8, scheduling_policy="priority")
    for name, priority in (("running", 0), ("late", 5), ("urgent", -1)):
        engine.add_request("abcd", GREEDY, request_id=name, priority=priority)
    finished = []
    while engine.has_unfinished:
        finished += [delta.request_id for delta in engine.step() if delta.finished]
    assert finished == ["urgent", "running", "late"]
