"""What the reference answered: the committed goldens, as plain data for any test.

goldens.json (the default model, float32) is a list with one object per case of cases.json: the fields of `Golden`.
tiny/<name>/ is a small random checkpoint (vocabulary 160, 2 layers), tiny/<name>.npz what it answers: `TinyGolden`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
TINY_NAMES = ("default", "linear", "llama3", "mistral_window", "untied_mha", "wide_heads", "yarn")
SURE_MARGIN = 0.02
"""Where the best logit leads by less, another correct float32 program may choose the other token."""
TINY_SURE_MARGIN = 1e-3
"""The same for the tiny checkpoints, whose sums are short."""


@dataclass(frozen=True, slots=True)
class Golden:
    """One prompt on the default model.

    messages: of a chat, else None; text: the prompt (a chat rendered with add_generation_prompt); prompt_ids: its ids.
    prompt_logprobs: entry 0 is None, entry i is of prompt token i given those before.
    top: for a few positions i of the prompt, the three best (id, logprob) for that position, best first.
    output_ids: 48 greedy tokens, not stopped by anything; margins: by how much each one's logit leads the second best.
    output_text: output_ids decoded, special tokens shown.
    """

    name: str
    messages: list[dict[str, str]] | None
    text: str
    prompt_ids: list[int]
    prompt_logprobs: list[float | None]
    top: dict[int, list[tuple[int, float]]]
    output_ids: list[int]
    margins: list[float]
    output_text: str

    @property
    def sure_length(self) -> int:
        """How many output tokens must match."""
        return _sure_length(self.margins, SURE_MARGIN)


@dataclass(frozen=True, slots=True)
class TinyGolden:
    """A tiny checkpoint in float32.

    path: the checkpoint; ids: int32 [80]; logprobs: float32 [80, vocab], row i is the distribution after ids[: i + 1].
    output_ids: int32 [48], greedy after ids[:prompt_length]; margins: float32 [48], as in Golden.
    """

    path: Path
    ids: np.ndarray
    logprobs: np.ndarray
    prompt_length: int
    output_ids: np.ndarray
    margins: np.ndarray

    @property
    def prompt_ids(self) -> list[int]:
        return [int(token) for token in self.ids[: self.prompt_length]]

    @property
    def sure_length(self) -> int:
        """How many output tokens must match."""
        return _sure_length(self.margins.tolist(), TINY_SURE_MARGIN)


def load_goldens(directory: Path = HERE) -> list[Golden]:
    """The cases of the default model, in the order of cases.json."""
    entries = json.loads((directory / "goldens.json").read_text(encoding="utf-8"))
    return [Golden(**{**entry, "top": _top(entry["top"])}) for entry in entries]


def load_tiny_golden(name: str, directory: Path = HERE) -> TinyGolden:
    """name: one of TINY_NAMES."""
    with np.load(directory / "tiny" / f"{name}.npz") as arrays:
        fields: dict[str, Any] = {key: arrays[key] for key in arrays.files}
    return TinyGolden(path=HERE / "tiny" / name, **{**fields, "prompt_length": int(fields["prompt_length"])})


def _top(entries: dict[str, list[list[Any]]]) -> dict[int, list[tuple[int, float]]]:
    return {int(i): [(int(token), float(logprob)) for token, logprob in best] for i, best in entries.items()}


def _sure_length(margins: list[float], enough: float) -> int:
    return next((i for i, margin in enumerate(margins) if margin < enough), len(margins))
