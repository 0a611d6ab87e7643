"""Every tiny checkpoint, loaded into the canonical tree and run by the numpy decoder, gives the reference's numbers."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from oracle.goldens import TINY_NAMES, TinyGolden, load_tiny_golden
from weights.numpy_decoder import log_probabilities

from jaxkv.models.config import ModelConfig, RopeConfig
from jaxkv.models.params import declare_params
from jaxkv.weights.load import LoadedModel, load_model, read_config
from jaxkv.weights.source import ModelSource


def load(golden: TinyGolden, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelSource("hf_dir", golden.path, golden.path.name), dtype)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_logprobs_equal_the_reference(name: str) -> None:
    golden = load_tiny_golden(name)
    model = load(golden)
    found = log_probabilities(model.config, model.params, golden.ids)
    np.testing.assert_allclose(found, golden.logprobs, atol=2e-4)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_greedy_tokens_equal_the_reference(name: str) -> None:
    golden = load_tiny_golden(name)
    model = load(golden)
    ids = np.concatenate([golden.ids[: golden.prompt_length], golden.output_ids])
    rows = log_probabilities(model.config, model.params, ids)[golden.prompt_length - 1 : -1]
    sure = golden.sure_length
    assert sure > 24
    assert rows.argmax(-1)[:sure].tolist() == golden.output_ids[:sure].tolist()


def without_scaling(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, rope=RopeConfig(theta=config.rope.theta))


def without_window(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, sliding_window=None)


def wider_window(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, sliding_window=9)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("linear", without_scaling),
        ("llama3", without_scaling),
        ("yarn", without_scaling),
        ("mistral_window", without_window),
        ("mistral_window", wider_window),
    ],
)
def test_goldens_notice_a_wrong_configuration(name: str, change) -> None:
    golden = load_tiny_golden(name)
    model = load(golden)
    wrong = log_probabilities(change(model.config), model.params, golden.ids)
    assert np.abs(wrong - golden.logprobs).max() > 0.1


@pytest.mark.parametrize("name", TINY_NAMES)
def test_tree_has_the_declared_shapes_and_dtypes(name: str) -> None:
    golden = load_tiny_golden(name)
    model = load(golden, "bfloat16")
    assert read_config(model.source) == model.config

    def check(specs: dict, arrays: dict) -> None:
        assert specs.keys() == arrays.keys()
        for key, spec in specs.items():
            if isinstance(spec, dict):
                check(spec, arrays[key])
            else:
                assert arrays[key].shape == spec.shape
                assert arrays[key].dtype == (np.float32 if spec.norm else ml_dtypes.bfloat16)

    check(declare_params(model.config), model.params)


def test_end_of_turn_and_files() -> None:
    model = load(load_tiny_golden("llama3"))
    assert model.eos_ids == (2,)
    assert len(model.files) == 3
    assert model.generation_config == {}
    assert model.tokenizer_data is None
