"""SmolLM2's own vocabulary, thinned to what these texts can use, against ids made by transformers.

The ids come from transformers with the model's published pre-tokenizer (single digits, then byte-level words).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxkv.core.tokenizer_data import TokenizerData, TokenType
from jaxkv.text.chat import render_chat
from jaxkv.text.tokenizer import Tokenizer

GOLDEN = json.loads(Path(__file__).with_name("smollm2_cases.json").read_text("utf-8"))
NUM_SPECIAL = 17


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokens = [GOLDEN["tokens"].get(str(index), f"[left out {index}]") for index in range(GOLDEN["size"])]
    types = [TokenType.CONTROL] * NUM_SPECIAL + [TokenType.NORMAL] * (len(tokens) - NUM_SPECIAL)
    return Tokenizer.from_gguf_metadata(
        TokenizerData(
            model="gpt2",
            pre="smollm",
            tokens=tokens,
            token_types=[int(kind) for kind in types],
            merges=GOLDEN["merges"],
            bos_id=1,
            eos_id=2,
            unk_id=0,
            pad_id=2,
            add_bos=False,
            add_space_prefix=False,
            chat_template=GOLDEN["chat_template"],
        )
    )


def test_same_ids_and_back(tokenizer: Tokenizer) -> None:
    assert len(GOLDEN["cases"]) > 50
    for case in GOLDEN["cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_ends_of_turn_and_specials(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.special_ids == set(range(NUM_SPECIAL))
    assert tokenizer.vocab_size == 49152


def test_chat(tokenizer: Tokenizer) -> None:
    prompt = render_chat(
        tokenizer.chat_template,
        [{"role": "user", "content": "Hello world!"}],
        add_generation_prompt=True,
        continue_final_message=False,
    )
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello world!<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert [ids.count(token) for token in (1, 2)] == [3, 2]
    assert (ids[0], ids[-1]) == (1, 198)
