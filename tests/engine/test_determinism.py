"""A request's answer depends on its prompt, parameters and seed alone, on every backend (float32: exact)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fixtures.engine_setups import HOPPER, OWN_CHOICE, SETUPS, TPU, XLA, Setup
from fixtures.static_scales import scales_file
from fixtures.tiny_engine import tiny_engine
from fixtures.workload import Answer, Job, answer_of, mixed_jobs, run_alone, run_together
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv import Engine, RequestDelta, SamplingParams, join_deltas

JOBS = OWN_CHOICE.jobs


def on(*setups: Setup) -> Any:
    """Which setups a test runs on, in place of all of them."""
    return pytest.mark.parametrize("setup", [_param(setup) for setup in setups], indirect=True)


def _param(setup: Setup) -> Any:
    return pytest.param(setup, marks=_marks(setup), id=setup.name)


def _marks(setup: Setup) -> list[pytest.MarkDecorator]:
    return [pytest.mark.interpret, pytest.mark.timeout(600)] if setup.is_interpreted else []


@pytest.fixture(scope="module", params=[_param(setup) for setup in SETUPS])
def setup(request: pytest.FixtureRequest) -> Iterator[Setup]:
    with request.param.active():
        yield request.param


@pytest.fixture(scope="module")
def engine(setup: Setup) -> Iterator[Engine]:
    engine = setup.engine()
    yield engine
    assert engine.stats().recompilations == 0
    engine.close()


@pytest.fixture(scope="module")
def alone(setup: Setup) -> list[Answer]:
    return setup.alone(setup.jobs)


@on(OWN_CHOICE)
def test_the_workload_says_something(alone: list[Answer]) -> None:
    assert len({answer.ids for answer in alone}) > 24
    assert {reason for answer in alone for reason, _ in answer.reasons} == {"stop", "length"}


def test_in_a_batch(setup: Setup, engine: Engine, alone: list[Answer]) -> None:
    """Where steps are narrow, in chunks, too."""
    setup.check(run_together(engine, setup.jobs), alone)


def test_with_its_prefix_cached(setup: Setup, engine: Engine, alone: list[Answer]) -> None:
    """A second time, with free pages full of NaN."""
    if not engine.stats().num_blocks_cached:
        run_together(engine, setup.jobs)
    hits = engine.stats().prefix_cache_hits
    engine.poison_free_pages()
    setup.check(run_together(engine, setup.jobs), alone)
    assert engine.stats().prefix_cache_hits > hits


def test_choices_share_the_page_in_which_their_prompt_ends(
    setup: Setup, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By copies on write, after which each goes on for itself: as it does alone, with nothing cached."""
    copies: list[tuple[int, int]] = []
    copy = engine._runner.copy_blocks
    monkeypatch.setattr(engine._runner, "copy_blocks", lambda pairs: (copies.extend(pairs), copy(pairs)))
    assert choices_together(engine) == choices_alone(engine)
    assert len(copies) == CHOICES.n - 1


@on(XLA)
def test_a_page_that_is_not_copied_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: without copies, and with those of a wrong page."""
    expected = choices_alone(engine)
    copy = engine._runner.copy_blocks
    for wrong in (lambda _: None, lambda pairs: copy([(target, target) for _, target in pairs])):
        monkeypatch.setattr(engine._runner, "copy_blocks", wrong)
        assert choices_together(engine) != expected


CHOICES = SamplingParams(n=3, temperature=1.5, seed=5, max_tokens=4, ignore_eos=True)
CHOICES_PROMPT = "gbhdceadged"


def choices_together(engine: Engine) -> list[tuple[int, ...]]:
    """Cached pages of earlier runs are of other prompts, and free ones, which might hold the right numbers still, are full of NaN."""
    engine.poison_free_pages()
    [output] = engine.generate([CHOICES_PROMPT], CHOICES, progress=False)
    engine.check()
    return [tuple(choice.token_ids) for choice in output.outputs]


def choices_alone(engine: Engine) -> list[tuple[int, ...]]:
    """As requests of their own, with the seeds that the choices have. One that wants its prompt scored computes all of it."""
    ids = []
    for index in range(CHOICES.n):
        seed = (5 + index * 0x9E3779B97F4A7C15) % 2**64
        params = dataclasses.replace(CHOICES, n=1, seed=seed - 2**64 * (seed >= 2**63), prompt_logprobs=0)
        ids.append(tuple(engine.generate([CHOICES_PROMPT], params, progress=False)[0].outputs[0].token_ids))
    assert len({*ids}) == CHOICES.n, "choices that go on alike prove nothing"
    return ids


@pytest.mark.parametrize("victim", [0, 1])
def test_with_a_neighbour_that_is_aborted(setup: Setup, engine: Engine, alone: list[Answer], victim: int) -> None:
    """While it reads its prompt, and while it generates."""
    engine.add_request("gcabd hcabbe", SamplingParams(max_tokens=9, ignore_eos=True), request_id="neighbour")
    ids = [engine.add_request(job.prompt, job.params) for job in setup.jobs[-3:]]
    deltas: dict[str, list[RequestDelta]] = {request_id: [] for request_id in (*ids, "neighbour")}
    steps = 0
    while engine.has_unfinished:
        steps += 1
        if steps == 2 + 2 * victim:
            assert engine.abort("neighbour")
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    engine.check()
    setup.check([answer_of(join_deltas(deltas[request_id])) for request_id in ids], alone[-3:])
    assert join_deltas(deltas["neighbour"]).outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("chunk", [16, 32])
@on(OWN_CHOICE)
def test_in_chunks(alone: list[Answer], chunk: int) -> None:
    assert run_together(tiny_engine(num_blocks=128, max_num_seqs=8, max_num_batched_tokens=chunk), JOBS) == alone


def test_after_forced_preemption(setup: Setup, alone: list[Answer]) -> None:
    engine = setup.engine(**setup.crowded)
    jobs = setup.jobs[:2] if setup.is_interpreted else setup.jobs
    setup.check(run_together(engine, jobs), alone[: len(jobs)])
    assert engine.stats().num_preemptions > 0


@pytest.mark.needs("native code")
def test_in_bfloat16() -> None:
    """Native code adds up every product of a row in one order, whatever the other rows."""
    settings = {"dtype": "bfloat16", "num_blocks": 128, "max_num_seqs": 32, "attention_backend": "cpu_native"}
    jobs = mixed_jobs(32)
    alone = run_alone(tiny_engine(**settings, enable_prefix_caching=False), jobs)
    engine = tiny_engine(**settings)
    assert run_together(engine, jobs) == alone
    assert run_together(engine, jobs) == alone
    assert run_together(tiny_engine(**settings, max_num_batched_tokens=32), jobs) == alone


@pytest.mark.parametrize("shards", [2, 4])
@on(OWN_CHOICE)
def test_on_several_devices(setup: Setup, alone: list[Answer], shards: int) -> None:
    assert run_together(setup.engine(tensor_parallel_size=shards), JOBS) == alone


@pytest.mark.parametrize(
    ("setup", "dtype"),
    [
        pytest.param(setup, dtype, marks=_marks(setup), id=f"{setup.name}-{dtype}")
        for setup, dtype in ((XLA, "float32"), (TPU, "float32"), (TPU, "int8"), (HOPPER, "int8"))
    ],
    indirect=["setup"],
)
def test_on_two_devices(setup: Setup, dtype: str) -> None:
    """Each has one KV head, and its scales, and copies its part of a page. Against one device."""
    jobs, settings = setup.jobs[1:3], {} if dtype == "float32" else {"kv_cache_dtype": dtype}
    engine = setup.engine(tensor_parallel_size=2, **settings)
    setup.check(run_together(engine, jobs), setup.alone(jobs, **settings), quantized=bool(settings))
    assert choices_together(engine) == choices_alone(engine)


@on(OWN_CHOICE)
def test_other_block_size(alone: list[Answer]) -> None:
    assert run_together(tiny_engine(num_blocks=64, block_size=8, max_num_seqs=32), JOBS) == alone


def test_a_window(setup: Setup) -> None:
    """That ends within a page and, later, within one before the last."""
    model = dataclasses.replace(setup.model, sliding_window=6)
    jobs = setup.jobs[1:3]
    expected = setup.alone(jobs, model=model)
    setup.check(run_together(setup.engine(model=model), jobs), expected)
    assert [answer.ids for answer in expected] != [answer.ids for answer in setup.alone(jobs)]


@on(OWN_CHOICE)
@settings(max_examples=15)
@given(
    order=st.permutations(range(len(JOBS))), gaps=st.lists(st.integers(0, 4), min_size=len(JOBS), max_size=len(JOBS))
)
def test_arriving_at_any_time(engine: Engine, alone: list[Answer], order: list[int], gaps: list[int]) -> None:
    assert run_arriving(engine, JOBS, order, gaps) == alone


@on(XLA, TPU, HOPPER)
def test_a_mix_arriving_at_any_time(setup: Setup, engine: Engine) -> None:
    """In two orders, the second with prefixes cached, on few seats: everything that a request can ask for."""
    expected = setup.alone(setup.mixed)
    count = len(expected)
    for seed in (0, 1):
        rng = random.Random(seed)
        gaps = [rng.choice((0, 1, 2, 4)) for _ in range(count)]
        found = run_arriving(engine, setup.mixed, rng.sample(range(count), count), gaps)
        setup.check(found, expected, jobs=setup.mixed)


def run_arriving(engine: Engine, jobs: list[Job], order: Sequence[int], gaps: Sequence[int]) -> list[Answer]:
    """One job after the other, so many steps between them, each with a neighbour, with free pages full of NaN."""
    ids: dict[str, int] = {}
    deltas: dict[int, list[RequestDelta]] = {index: [] for index in order}

    def step() -> None:
        engine.poison_free_pages()
        for delta in engine.step():
            if delta.request_id in ids:
                deltas[ids[delta.request_id]].append(delta)

    for index, gap in zip(order, gaps, strict=True):
        ids[engine.add_request(jobs[index].prompt, jobs[index].params)] = index
        neighbour = engine.add_request("an unseeded neighbour", SamplingParams(max_tokens=gap + 1))
        for _ in range(gap):
            step()
        if gap == 4:
            engine.abort(neighbour)
    while engine.has_unfinished:
        step()
    engine.check()
    return [answer_of(join_deltas(deltas[index])) for index in sorted(order)]


@on(OWN_CHOICE)
@pytest.mark.needs("float32 pages")
def test_many_on_the_xla_path(setup: Setup, alone: list[Answer]) -> None:
    """The same answers as the engine's own choice gives."""
    assert run_together(setup.engine(attention_backend="reference"), JOBS) == alone


@on(OWN_CHOICE)
def test_many_with_quantized_pages(setup: Setup) -> None:
    """Against the same pages alone: in a batch, with the prefix cached, and preempted. A page holds a byte per element."""
    jobs = [job for job in JOBS if job.params.prompt_logprobs is None]
    engine = setup.engine(max_num_seqs=16, max_model_len=64, kv_cache_dtype="int8", kv_cache_memory_bytes=400_000)
    alone = [run_together(engine, [job])[0] for job in jobs]
    assert run_together(engine, jobs) == alone
    (group,) = engine._runner.pool
    assert group.pages.nbytes == group.pages.size
    engine.poison_free_pages()
    assert run_together(engine, jobs) == alone


@pytest.mark.parametrize(
    ("setup", "dtype", "scale"),
    [
        pytest.param(setup, dtype, scale, marks=_marks(setup), id=f"{setup.name}-{dtype}{'-static' if scale else ''}")
        for setup, pools in (
            (XLA, (("int8", None), ("fp8_e4m3", 0.05), ("fp8_e5m2", None))),
            (TPU, (("int8", None), ("fp8_e4m3", None), ("fp8_e5m2", 0.01))),
            (HOPPER, (("int8", None), ("fp8_e4m3", 0.05), ("fp8_e5m2", None))),
        )
        for dtype, scale in pools
    ],
    indirect=["setup"],
)
def test_quantized_pages(setup: Setup, dtype: str, scale: float | None, tmp_path: Path) -> None:
    """In a batch in chunks, with the prefix cached, and copied for choices. A page holds a byte per element."""
    jobs, pool = setup.jobs[1:3], {"kv_cache_dtype": dtype}
    if scale is not None:
        pool["kv_cache_scales"] = scales_file(tmp_path / "scales.json", dtype, scale)
    alone = setup.alone(jobs, **pool)
    engine = setup.engine(**pool)
    (group,) = engine._runner.pool
    assert group.pages.nbytes == group.pages.size
    setup.check(run_together(engine, jobs), alone, quantized=True)
    engine.poison_free_pages()
    setup.check(run_together(engine, jobs), alone, quantized=True)
    assert engine.stats().prefix_cache_hits > 0
    assert choices_together(engine) == choices_alone(engine)


SCORED = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)


@on(HOPPER)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_logprobs_of_prompts(setup: Setup, dtype: str) -> None:
    """Within the rounding of 16 bits, in chunks. Where nothing is rounded, they are part of the mix above."""
    engine = setup.engine(kv_cache_dtype=dtype)
    jobs = [Job(prompt, SCORED) for prompt in ("bcb  ggeee", "hbec fbceaaade ")]
    for found, wanted in zip(run_together(engine, jobs), setup.alone(jobs, kv_cache_dtype=dtype), strict=True):
        assert found.ids == wanted.ids
        assert len(found.logprobs) > 3 * SCORED.max_tokens
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=setup.tolerance)
