"""The default model's GGUF, run by the numpy decoder, gives what the reference gives."""

from __future__ import annotations

import numpy as np
import pytest
from oracle.goldens import load_goldens
from weights.numpy_decoder import log_probabilities

from jaxkv.models.config import RopeConfig
from jaxkv.weights.catalog import DEFAULT_MODEL
from jaxkv.weights.hub import resolve
from jaxkv.weights.load import LoadedModel, load_model, read_config

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
