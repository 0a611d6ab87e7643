"""What `transformers` (torch, CPU, float32) answers for fixed cases. Run with the oracle's Python:

    .venv-oracle/bin/python tests/oracle/make_goldens.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out tests/oracle

Writes OUT/goldens.json for the cases of cases.json, and OUT/tiny/<name>.npz for every checkpoint under tiny/.
Shares no code with jaxkv. The formats are described where they are read, in goldens.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
NEW_TOKENS = 48
TOP = 3
TINY_LENGTH = 80
TINY_PROMPT = 24
TINY_NEW_TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True, help="the default model's file")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--only", nargs="*", help="names of cases; all if not given")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    (arguments.out / "tiny").mkdir(parents=True, exist_ok=True)
    for directory in sorted(path.parent for path in HERE.glob("tiny/*/config.json")):
        np.savez_compressed(arguments.out / "tiny" / f"{directory.name}.npz", **tiny_golden(directory))
    model = load(arguments.gguf.parent, gguf_file=arguments.gguf.name)
    tokenizer = load_tokenizer(arguments.gguf)
    cases = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
    chosen = [case for case in cases if arguments.only is None or case["name"] in arguments.only]
    goldens = [golden(model, tokenizer, case) for case in chosen]
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) for entry in goldens)
    (arguments.out / "goldens.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def load(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()


def load_tokenizer(gguf: Path) -> Any:
    """transformers ignores `tokenizer.ggml.pre`; "smollm" splits digits off before the byte-level rule."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    splits = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splits)
    return tokenizer


def golden(model: Any, tokenizer: Any, case: dict[str, Any]) -> dict[str, Any]:
    text = case.get("text")
    if text is None:
        text = tokenizer.apply_chat_template(case["messages"], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text)["input_ids"]
    logprobs = log_softmax(model(torch.tensor([ids])).logits[0])
    chosen = [None] + [round(float(logprobs[i - 1, token]), 6) for i, token in enumerate(ids) if i]
    shown = sorted({1, len(ids) // 2, len(ids) - 1} - {0}) if len(ids) > 1 else []
    output, margins = greedy(model, ids, NEW_TOKENS)
    return {
        "name": case["name"],
        "messages": case.get("messages"),
        "text": text,
        "prompt_ids": ids,
        "prompt_logprobs": chosen,
        "top": {str(i): best(logprobs[i - 1]) for i in shown},
        "output_ids": output,
        "margins": margins,
        "output_text": tokenizer.decode(output, skip_special_tokens=False),
    }


def greedy(model: Any, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """`count` best tokens, one by one, never stopping, and by how much each best logit leads."""
    output: list[int] = []
    margins: list[float] = []
    step = model(torch.tensor([ids]), use_cache=True)
    while True:
        two = torch.topk(step.logits[0, -1], 2)
        output.append(int(two.indices[0]))
        margins.append(round(float(two.values[0] - two.values[1]), 6))
        if len(output) == count:
            return output, margins
        step = model(torch.tensor([output[-1:]]), past_key_values=step.past_key_values, use_cache=True)


def best(logprobs: np.ndarray) -> list[list[Any]]:
    order = np.argsort(-logprobs, kind="stable")[:TOP]
    return [[int(token), round(float(logprobs[token]), 6)] for token in order]


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(logits.float(), dim=-1).numpy()


def tiny_golden(directory: Path) -> dict[str, np.ndarray]:
    model = load(directory)
    seed = sum(directory.name.encode())
    ids = np.random.default_rng(seed).integers(3, model.config.vocab_size, TINY_LENGTH)
    output, margins = greedy(model, ids[:TINY_PROMPT].tolist(), TINY_NEW_TOKENS)
    return {
        "ids": ids.astype(np.int32),
        "logprobs": log_softmax(model(torch.from_numpy(ids)[None]).logits[0]),
        "prompt_length": np.int32(TINY_PROMPT),
        "output_ids": np.array(output, np.int32),
        "margins": np.array(margins, np.float32),
    }


if __name__ == "__main__":
    main()
