"""What `transformers` (torch, CPU, float32) makes of Hugging Face directories. Run with the oracle's Python:

    .venv-oracle/bin/python tests/oracle/ask_directory.py QUESTIONS.json ANSWERS

QUESTIONS: a list of {"directory", "ids"} and, for a directory with a tokenizer, {"texts", "messages"}.
Writes ANSWERS/<index>.json (dtype; with a tokenizer its ids of the texts, what they decode to, and the rendered chat) and
ANSWERS/<index>.npy (float32 [len(ids), vocab]: log-probabilities after each of the ids).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    questions = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = Path(sys.argv[2])
    torch.set_grad_enabled(False)
    for index, question in enumerate(questions):
        answers, logprobs = ask(question)
        (out / f"{index}.json").write_text(json.dumps(answers), encoding="utf-8")
        np.save(out / f"{index}.npy", logprobs)


def ask(question: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray]:
    directory = question["directory"]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    logits = model(torch.tensor([question["ids"]])).logits[0]
    answers: dict[str, Any] = {"dtype": str(AutoConfig.from_pretrained(directory).dtype)}
    if "texts" in question:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ids = [tokenizer(text)["input_ids"] for text in question["texts"]]
        chat = tokenizer.apply_chat_template(question["messages"], add_generation_prompt=True, tokenize=False)
        answers |= {"ids": ids, "decoded": [tokenizer.decode(entry) for entry in ids], "chat": chat}
        answers["eos_token_id"] = model.generation_config.eos_token_id
    return answers, torch.log_softmax(logits.float(), dim=-1).numpy()


if __name__ == "__main__":
    main()
