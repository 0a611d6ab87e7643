"""The engine against `transformers`: tiny checkpoints of every rope and shape, and the default model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fixtures.byte_tokenizer import byte_tokenizer
from oracle.goldens import TINY_NAMES, load_goldens, load_tiny_golden

from jaxkv import Engine, EngineConfig, SamplingParams
from jaxkv.engine.build import assemble
from jaxkv.weights.hub import resolve
from jaxkv.weights.load import load_model

GOLDENS = load_goldens()


@pytest.mark.needs("small heads")
@pytest.mark.parametrize("name", TINY_NAMES)
def test_tiny_checkpoint(name: str) -> None:
    """Log-probabilities along 80 tokens, and 48 greedy tokens through the paged cache in chunks of 16."""
    golden = load_tiny_golden(name)
    loaded = load_model(resolve(str(golden.path)), "float32")
    config = EngineConfig(
        model=name, dtype="float32", max_num_seqs=8, max_num_batched_tokens=16, block_size=4, compilation_cache_dir=""
    )
    engine = assemble(config, loaded.config, loaded.params, byte_tokenizer(), {}, loaded.eos_ids)
    ids = [int(token) for token in golden.ids]
    scored = engine.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=5))[0].prompt_logprobs
    assert scored is not None
    for position, entry in enumerate(scored[1:], start=1):
        assert entry is not None
        expected = golden.logprobs[position - 1]
        assert entry.logprob == pytest.approx(expected[ids[position]], abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx(sorted(expected, reverse=True)[:5], abs=1e-3)
        assert all(value == pytest.approx(expected[token], abs=1e-3) for token, value in entry.top)
    greedy = SamplingParams(temperature=0.0, max_tokens=len(golden.output_ids), ignore_eos=True)
    written = engine.generate(golden.prompt_ids, greedy)[0].outputs[0].token_ids
    assert golden.sure_length > 20
    assert written[: golden.sure_length] == golden.output_ids[: golden.sure_length].tolist()


@pytest.fixture(scope="module")
def default_model() -> Iterator[Engine]:
    engine = Engine.from_pretrained(
        "smollm2-135m-instruct",
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        compilation_cache_dir="",
    )
    yield engine
    assert engine.stats().recompilations == 0
    engine.close()


@pytest.mark.slow
def test_default_model_tokens(default_model: Engine) -> None:
    """Greedy tokens, all prompts in one batch, up to the first position where the two best logits are closer than 0.02."""
    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, skip_special_tokens=False)
    prompts = [golden.prompt_ids for golden in GOLDENS]
    outputs = default_model.generate(prompts, greedy, progress=False)
    assert len(GOLDENS) >= 12
    assert sum(golden.sure_length for golden in GOLDENS) > 0.5 * 48 * len(GOLDENS)
    for golden, output in zip(GOLDENS, outputs, strict=True):
        sure = golden.sure_length
        assert output.outputs[0].token_ids[:sure] == golden.output_ids[:sure], golden.name
        if sure == len(golden.output_ids):
            assert output.outputs[0].text == golden.output_text


@pytest.mark.slow
def test_default_model_prompt_logprobs(default_model: Engine) -> None:
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=3)
    outputs = default_model.generate([golden.prompt_ids for golden in GOLDENS], scoring, progress=False)
    for golden, output in zip(GOLDENS, outputs, strict=True):
        scored = output.prompt_logprobs
        assert scored is not None
        assert scored[0] is None
        values = [entry.logprob for entry in scored[1:] if entry is not None]
        assert values == pytest.approx(golden.prompt_logprobs[1:], abs=1e-3), golden.name
        for position, top in golden.top.items():
            entry = scored[position]
            assert entry is not None
            assert [value for _, value in entry.top] == pytest.approx([value for _, value in top], abs=1e-3)


@pytest.mark.slow
def test_default_model_prompts(default_model: Engine) -> None:
    """Texts and chats become the reference's token ids (its own splitting of digits set right)."""
    for golden in GOLDENS:
        prompt = golden.messages or golden.text
        assert list(default_model.prepare(prompt, SamplingParams(max_tokens=1)).prompt_token_ids) == golden.prompt_ids


def test_goldens_are_varied() -> None:
    names = [golden.name for golden in GOLDENS]
    assert len(set(names)) == len(names) >= 12
    assert max(len(golden.prompt_ids) for golden in GOLDENS) > 1400
    assert any(golden.messages for golden in GOLDENS)
