"""What `jaxkv convert` writes means the same to transformers, where the reference environment has been built (`make oracle`)."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle.goldens import HERE, TINY_NAMES, load_goldens, load_tiny_golden
from oracle.test_goldens import ORACLE
from weights.numpy_decoder import log_probabilities

from jaxkv.cli.convert import write_hf_dir
from jaxkv.text.chat import render_chat
from jaxkv.text.tokenizer import Tokenizer
from jaxkv.weights.catalog import DEFAULT_MODEL
from jaxkv.weights.hf_writer import write_hf_model
from jaxkv.weights.hub import resolve
from jaxkv.weights.load import load_model, open_checkpoint
from jaxkv.weights.source import ModelSource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MESSAGES = [{"role": "user", "content": "Grüße, 2024?"}, {"role": "assistant", "content": "Hello."}]
TEXTS = [
    *(golden.text for golden in load_goldens()),
    "tab\tand  spaces\n\n 12345",
    "<|im_start|>user\n日本 \U0001f600<|im_end|>",
]


def tiny(name: str, target: Path) -> dict[str, Any]:
    """A tiny checkpoint whose config.json is written anew, as for a GGUF file."""
    golden = load_tiny_golden(name)
    checkpoint = open_checkpoint(ModelSource("hf_dir", golden.path, name))
    target.mkdir()
    as_gguf = dataclasses.replace(checkpoint, source=dataclasses.replace(checkpoint.source, kind="gguf"))
    write_hf_model(as_gguf, target, bos_id=1, eos_ids=(2,))
    return {"directory": str(target), "ids": golden.ids.tolist()}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """The questions, the default model's first, and the directory of the answers."""
    if not ORACLE.exists():
        pytest.skip("the reference environment is not built: make oracle")
    out = tmp_path_factory.mktemp("converted")
    write_hf_dir(resolve(DEFAULT_MODEL), out / "default_model")
    golden = next(golden for golden in load_goldens() if golden.name == "english")
    ids = golden.prompt_ids + golden.output_ids
    first = {"directory": str(out / "default_model"), "ids": ids, "texts": TEXTS, "messages": MESSAGES}
    questions = [first, *(tiny(name, out / name) for name in TINY_NAMES)]
    (out / "questions.json").write_text(json.dumps(questions), encoding="utf-8")
    command = [str(ORACLE), str(HERE / "ask_directory.py"), str(out / "questions.json"), str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return questions, out


@pytest.mark.parametrize("index", range(1 + len(TINY_NAMES)), ids=["default_model", *TINY_NAMES])
def test_the_same_probabilities(asked: tuple[list[dict[str, Any]], Path], index: int) -> None:
    questions, out = asked
    question = questions[index]
    model = load_model(ModelSource("hf_dir", Path(question["directory"]), "converted"), "float32")
    found = log_probabilities(model.config, model.params, np.array(question["ids"]))
    expected = np.load(out / f"{index}.npy")
    np.testing.assert_allclose(found, expected, atol=1e-3 if index == 0 else 2e-4)
    assert json.loads((out / f"{index}.json").read_text("utf-8"))["dtype"] == "torch.bfloat16"


def test_the_same_tokenizer(asked: tuple[list[dict[str, Any]], Path]) -> None:
    """transformers' AutoTokenizer reads the directory, ours reads the GGUF file that it came from."""
    questions, out = asked
    answers = json.loads((out / "0.json").read_text("utf-8"))
    data = open_checkpoint(resolve(DEFAULT_MODEL)).tokenizer_data
    assert data is not None
    tokenizer = Tokenizer.from_gguf_metadata(data)
    assert answers["ids"] == [tokenizer.encode(text) for text in TEXTS]
    assert answers["decoded"] == TEXTS
    assert answers["chat"] == render_chat(
        tokenizer.chat_template,
        MESSAGES,
        add_generation_prompt=True,
        continue_final_message=False,
        **tokenizer.special_tokens,
    )
    assert answers["eos_token_id"] == [2, 0]
    ours = Tokenizer.from_hf_dir(Path(questions[0]["directory"]), extra_eos_ids=(2, 0))
    assert [ours.encode(text) for text in TEXTS] == answers["ids"]
