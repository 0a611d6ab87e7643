"""The sampler against plain numpy: filters exactly, draws by their frequencies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.core.sampling_params import SamplingParams
from jaxkv.runtime import sampler, slot_state
from jaxkv.runtime.logprobs import logprobs_of
from jaxkv.runtime.sampler import SamplingFlags
from jaxkv.runtime.slot_state import SlotState

V = 50


def state_of(
    *params: SamplingParams,
    seeds: list[int] | None = None,
    outputs: list[list[int]] | None = None,
    prompts: list[list[int]] | None = None,
    stop_ids: tuple[int, ...] = (),
) -> SlotState:
    """A state with one slot for each of `params`."""
    state = jax.tree.map(jnp.asarray, slot_state.empty_state(len(params) + 1, V))
    for slot, p in enumerate(params):
        output = outputs[slot] if outputs else []
        row = slot_state.slot_row(
            p, stop_ids, seeds[slot] if seeds else slot, prompts[slot] if prompts else [0], output, V
        )
        state = slot_state.seat(state, np.int32(slot), row)
        for prompt_ids, output_ids in slot_state.history_chunks(prompts[slot] if prompts else [], output, V):
            state = slot_state.add_history(state, np.int32(slot), prompt_ids, output_ids)
    return state


ALL_FLAGS = SamplingFlags(**{name: np.bool_(True) for name in SamplingFlags.__dataclass_fields__})
sample = jax.jit(sampler.sample)


def draws(logits: np.ndarray, params: SamplingParams, count: int = 4000) -> np.ndarray:
    """Tokens of `count` seeds."""
    state = state_of(params)
    rows = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], count, axis=0), state)
    rows = rows.replace(seed=jnp.stack([jnp.zeros(count, jnp.uint32), jnp.arange(count, dtype=jnp.uint32)], axis=1))
    return np.asarray(sample(jnp.tile(jnp.asarray(logits)[None], (count, 1)), rows, jnp.arange(count), ALL_FLAGS))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def expected_distribution(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Temperature, then min-p, top-k and top-p, each on what the one before left; sorted, so by another road."""
    probs = softmax(logits.astype(np.float64) / p.temperature)
    probs[probs < p.min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if 0 < p.top_k < V:
        probs[order[p.top_k :]] = 0
    probs /= probs.sum()
    if p.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        reached = np.cumsum(probs[order])
        probs[order[int(np.searchsorted(reached, p.top_p)) + 1 :]] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 3}, {"top_k": 1}, {"top_k": 49}, {"top_k": 500}, {"top_k": -1},
     {"top_p": 0.5}, {"top_p": 0.01}, {"top_p": 0.999}, {"min_p": 0.2}, {"min_p": 1.0},
     {"temperature": 1.5, "top_k": 10, "top_p": 0.7, "min_p": 0.02}],
)  # fmt: skip
def test_draws_follow_the_distribution(fields: dict[str, Any]) -> None:
    logits = np.random.default_rng(3).normal(0, 2, V).astype(np.float32)
    params = SamplingParams(**{"max_tokens": 1, **fields})
    expected = expected_distribution(logits, params)
    tokens = draws(logits, params)
    counts = np.bincount(tokens, minlength=V)
    assert counts[expected == 0].sum() == 0
    # Five standard deviations of a binomial, for every token.
    deviation = np.sqrt(len(tokens) * expected * (1 - expected))
    assert (np.abs(counts - len(tokens) * expected) <= 5 * deviation + 1).all()


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(-30, 30, width=32, allow_subnormal=False), min_size=V, max_size=V),
    k=st.integers(1, V),
    p=st.floats(0.01, 0.99),
)
def test_filters_keep_what_sorting_keeps(values: list[float], k: int, p: float) -> None:
    """With ties kept whole: everything at or above the k-th value, and the nucleus."""
    x = np.array(values, np.float32)
    kept = np.asarray(sampler._keep_top_k(jnp.asarray(x)[None], jnp.array([k])))[0] > -np.inf
    assert (kept == (x >= np.sort(x)[-k])).all()
    scaled = x - x.max()
    nucleus = np.asarray(sampler._keep_top_p(jnp.asarray(scaled)[None], jnp.array([p], jnp.float32)))[0] > -np.inf
    weights = np.exp(scaled.astype(np.float64))
    inside = weights[nucleus].sum() / weights.sum()
    assert inside >= p - 1e-5
    smallest = scaled[nucleus].min()
    without_last = weights[scaled > smallest].sum() / weights.sum()
    assert without_last < p + 1e-5
    assert (nucleus == (scaled >= smallest)).all()


def test_tiny_temperature_is_greedy_and_finite() -> None:
    logits = np.random.default_rng(0).normal(0, 50, V).astype(np.float32)
    for temperature in (1e-300, 1e-30, 1e-5):
        assert set(draws(logits, SamplingParams(temperature=temperature, max_tokens=1), 20).tolist()) == {
            int(logits.argmax())
        }


def test_penalties_match_their_formulas() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 2, (1, V)).astype(np.float32)
    params = SamplingParams(
        temperature=0.0, max_tokens=9, repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=-0.3
    )
    prompt, output = [1, 2, 3, 3], [3, 4, 4, 4]
    state = state_of(params, prompts=[prompt], outputs=[output])
    got = np.asarray(sampler._penalize(jnp.asarray(logits), state, jnp.array([0])))[0]
    expected = logits[0].astype(np.float64).copy()
    for token in set(prompt + output):
        expected[token] = expected[token] / 1.7 if expected[token] > 0 else expected[token] * 1.7
    for token in set(output):
        expected[token] -= -0.3 * output.count(token) + 0.4
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_long_history_is_counted_whole() -> None:
    output = [i % 7 for i in range(2500)]
    state = state_of(
        SamplingParams(temperature=0.0, max_tokens=9, presence_penalty=1.0), prompts=[[9] * 1500], outputs=[output]
    )
    assert np.asarray(state.output_counts[0]).sum() == 2500
    assert np.asarray(state.output_counts[0, :7]).tolist() == [output.count(i) for i in range(7)]
    assert np.flatnonzero(np.asarray(state.prompt_seen[0])).tolist() == [9]


def test_bias_and_bans() -> None:
    logits = jnp.zeros((3, V)).at[:, 5].set(3.0)
    params = (
        SamplingParams(temperature=0.0, max_tokens=9, logit_bias={7: 100.0}),
        SamplingParams(temperature=0.0, max_tokens=9, min_tokens=2),
        SamplingParams(temperature=0.0, max_tokens=9, min_tokens=2),
    )
    state = state_of(*params, stop_ids=(5, 0), outputs=[[], [1], [1, 1]])
    tokens = np.asarray(sample(logits, state, jnp.arange(3), ALL_FLAGS)).tolist()
    assert tokens == [7, 1, 5]


def test_a_seed_and_a_position_decide_the_draw() -> None:
    logits = jnp.zeros((4, V))
    p = SamplingParams(max_tokens=9)
    state = state_of(p, p, p, p, seeds=[1, 1, 2, 1], outputs=[[], [], [], [4]])
    first, same, other_seed, later = np.asarray(sample(logits, state, jnp.arange(4), ALL_FLAGS)).tolist()
    assert first == same
    assert len({first, other_seed, later}) > 1


def test_logprobs_match_numpy() -> None:
    logits = np.random.default_rng(2).normal(0, 3, (5, V)).astype(np.float32)
    chosen = np.array([0, 10, 20, 30, 49], np.int32)
    got = logprobs_of(jnp.asarray(logits), jnp.asarray(chosen))
    logp = np.log([softmax(row.astype(np.float64)) for row in logits])
    np.testing.assert_allclose(np.asarray(got.chosen), logp[np.arange(5), chosen], atol=1e-5)
    assert np.asarray(got.rank).tolist() == [
        1 + int((row > row[c]).sum()) for row, c in zip(logits, chosen, strict=True)
    ]
    np.testing.assert_allclose(np.asarray(got.top), -np.sort(-logp, axis=1)[:, :20], atol=1e-5)
    np.testing.assert_array_equal(np.asarray(got.top_ids), np.argsort(-logits, axis=1)[:, :20])


def test_the_first_of_equal_maxima_wins_and_nan_stays_in_the_vocabulary() -> None:
    rows = jnp.array([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [jnp.nan, 0.0, 1.0, 0.0], [-jnp.inf] * 4])
    assert sampler._argmax(rows).tolist() == [1, 0, 3, 0]
