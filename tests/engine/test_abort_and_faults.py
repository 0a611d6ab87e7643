"""Aborts at any time, and faults inside a step: nothing is lost, nothing is kept, the others go on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from fixtures.tiny_engine import TINY, tiny_engine

from jaxkv import Engine, RequestDelta, SamplingParams, join_deltas

WORKLOAD = {
    "long": (
        "a prompt that takes several chunks to read",
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    ),
    "three": ("three of me", SamplingParams(seed=4, n=3, max_tokens=5, ignore_eos=True)),
    "late": ("waiting", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)),
}


@pytest.fixture(scope="module")
def narrow() -> Engine:
    """Small steps and few seats, so that requests are met while they wait, between chunks and while they decode."""
    return tiny_engine(num_blocks=32, max_num_seqs=4, max_num_batched_tokens=8)


def run(engine: Engine, abort_at: int | None, victim: str) -> tuple[dict[str, list[RequestDelta]], int]:
    deltas: dict[str, list[RequestDelta]] = {name: [] for name in WORKLOAD}
    for name, (prompt, params) in WORKLOAD.items():
        engine.add_request(prompt, params, request_id=name, cache_salt=f"{abort_at}-{victim}-{name}")
    steps = 0
    while engine.has_unfinished:
        if steps == abort_at:
            engine.abort(victim)
            assert engine.abort(victim) is False
            assert engine.abort("nobody") is False
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
        steps += 1
        assert steps < 200, "the engine does not come to an end"
    engine.check()
    assert engine.stats().num_blocks_held == 0
    return deltas, steps


@pytest.mark.parametrize("victim", list(WORKLOAD))
def test_abort_at_every_step(narrow: Engine, victim: str) -> None:
    untouched, steps = run(narrow, None, victim)
    for at in range(steps):
        deltas, _ = run(narrow, at, victim)
        for name in WORKLOAD:
            assert [delta.finished for delta in deltas[name]].count(True) == 1
            assert deltas[name][-1].finished
            output, whole = join_deltas(deltas[name]), join_deltas(untouched[name])
            if name != victim:
                assert output.outputs == whole.outputs
                continue
            for choice, full in zip(output.outputs, whole.outputs, strict=True):
                assert choice.token_ids == full.token_ids[: len(choice.token_ids)]
                assert choice.finish_reason == ("abort" if choice.token_ids != full.token_ids else full.finish_reason)


class BrokenOnce:
    """Stands before the runner's step and fails at one call, before or after the step took its buffers."""

    def __init__(self, engine: Engine, at: int, *, destroy: bool) -> None:
        self.runner, self.at, self.destroy, self.calls = engine._runner, at, destroy, 0
        self.run = engine._runner.run

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            if self.destroy:
                jax.tree.map(lambda leaf: leaf.delete(), self.runner.pool)
            raise RuntimeError("the device caught fire")
        return self.run(*args)


@pytest.mark.parametrize("destroy", [False, True])
@pytest.mark.parametrize("at", [1, 3, 7])
def test_a_fault_ends_the_requests_of_its_step_and_no_others(
    narrow: Engine, monkeypatch: pytest.MonkeyPatch, at: int, destroy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = run(narrow, None, "nobody")
    with monkeypatch.context() as patch:
        patch.setattr(narrow._runner, "run", BrokenOnce(narrow, at, destroy=destroy))
        deltas, _ = run(narrow, None, f"fault{at}{destroy}")
    broken = 0
    for name in WORKLOAD:
        output, whole = join_deltas(deltas[name]), join_deltas(expected[name])
        for choice, full in zip(output.outputs, whole.outputs, strict=True):
            if choice.finish_reason == "error":
                broken += 1
                assert "the device caught fire" in (choice.error or "")
            else:
                assert choice == full
    assert broken > 0
    after, _ = run(narrow, None, f"after{at}{destroy}")
    assert {name: join_deltas(d).outputs for name, d in after.items()} == {
        name: join_deltas(d).outputs for name, d in expected.items()
    }


def test_logits_that_are_not_numbers_end_only_their_request() -> None:
    """A damaged embedding row breaks the requests that use it and no others (the output table is separate)."""
    engine = tiny_engine(model=dataclasses.replace(TINY, tie_embeddings=False), max_num_batched_tokens=16)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    healthy = engine.generate("fine", greedy)[0]
    weights = engine._runner._params
    weights["embed"] = weights["embed"].at[ord("!")].set(np.nan)
    fine, bad = engine.generate(["fine", "bad!"], greedy, progress=False)
    assert fine.outputs == healthy.outputs
    assert bad.outputs[0].finish_reason == "error"
    assert "not finite" in (bad.outputs[0].error or "")
    engine.check()
