"""The default model's GGUF, run by the numpy decoder, gives what the reference gives."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from oracle.goldens import load_goldens
from weights.numpy_decoder import log_probabilities

from jaxkv.cli.convert import write_hf_dir
from jaxkv.models.config import RopeConfig
from jaxkv.text.tokenizer import Tokenizer
from jaxkv.weights.catalog import DEFAULT_MODEL
from jaxkv.weights.hub import resolve
from jaxkv.weights.load import LoadedModel, load_model, read_config
from jaxkv.weights.source import ModelSource

pytestmark = pytest.mark.slow
CASES = [
    golden for golden in load_goldens() if golden.name in ("english", "spanish", "digits_and_spaces", "chat_plain")
]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(resolve(DEFAULT_MODEL), "float32")


def test_configuration(model: LoadedModel) -> None:
    config = model.config
    assert read_config(model.source) == config
    assert (config.vocab_size, config.num_layers, config.num_heads, config.num_kv_heads) == (49152, 30, 9, 3)
    assert (config.head_dim, config.max_position, config.tie_embeddings) == (64, 8192, True)
    assert config.rope == RopeConfig(theta=100_000.0)
    assert model.eos_ids == (2,)
    assert model.tokenizer_data is not None
    assert model.tokenizer_data.chat_template


def test_converted_to_a_hugging_face_directory_it_is_the_same_model(tmp_path: Path) -> None:
    """The same bits of weights, configuration and tokens, so the same logits."""
    source = resolve(DEFAULT_MODEL)
    write_hf_dir(source, tmp_path / "hf")
    before = load_model(source, "bfloat16")
    after = load_model(ModelSource("hf_dir", tmp_path / "hf", "hf"), "bfloat16")
    assert (after.config, after.generation_config) == (before.config, before.generation_config)
    leaves = [jax.tree_util.tree_leaves_with_path(model.params) for model in (before, after)]
    assert len(leaves[0]) == 8
    for (path, old), (_, new) in zip(*leaves, strict=True):
        assert old.dtype == new.dtype
        assert old.tobytes() == new.tobytes(), path
    assert before.tokenizer_data is not None
    old_tokens = Tokenizer.from_gguf_metadata(before.tokenizer_data)
    new_tokens = Tokenizer.from_hf_dir(tmp_path / "hf", extra_eos_ids=after.eos_ids)
    assert set(new_tokens.eos_ids) == {*old_tokens.eos_ids, *before.eos_ids}
    for golden in load_goldens():
        assert new_tokens.encode(golden.text) == golden.prompt_ids
        assert new_tokens.decode(golden.output_ids, skip_special_tokens=False) == golden.output_text


@pytest.mark.parametrize("golden", CASES, ids=[golden.name for golden in CASES])
def test_logprobs_and_greedy_tokens(model: LoadedModel, golden) -> None:
    ids = np.array(golden.prompt_ids + golden.output_ids)
    rows = log_probabilities(model.config, model.params, ids[:-1])
    first = len(golden.prompt_ids) - 1
    found = rows[np.arange(first), ids[1 : first + 1]]
    np.testing.assert_allclose(found, np.array(golden.prompt_logprobs[1:], np.float32), atol=1e-3)
    for position, best in golden.top.items():
        for token, logprob in best:
            assert rows[position - 1, token] == pytest.approx(logprob, abs=1e-3)
    sure = golden.sure_length
    assert rows[first:].argmax(-1)[:sure].tolist() == golden.output_ids[:sure]
