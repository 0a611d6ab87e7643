"""Writes README's comparison from its JSON, between two markers; the first one names the file.

python benchmarks/readme_table.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.comparison import tables

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
_BLOCK = re.compile(r"(<!-- comparison of (\S+), written by \S+ -->\n).*?(<!-- end of comparison -->)", re.DOTALL)


def main() -> None:
    text = README.read_text(encoding="utf-8")
    if not _BLOCK.search(text):
        sys.exit(f"{README} has no block between the markers of a comparison")
    README.write_text(filled(text), encoding="utf-8")


def filled(text: str, root: Path = ROOT) -> str:
    """The text with what each block's JSON says."""

    def block(match: re.Match[str]) -> str:
        path = Path(match[2])
        lines = ["Not measured yet."]
        if (root / path).exists():
            lines = comparison(json.loads((root / path).read_text(encoding="utf-8")), path)
        return match[1] + "\n".join(lines) + "\n" + match[3]

    return _BLOCK.sub(block, text)


def comparison(result: dict[str, Any], path: Path) -> list[str]:
    """The lines of a block: conditions, tables, how each server ran, picture."""
    found, load = result["conditions"], result["conditions"]["load"]
    rounds = max(turn["round"] for turn in result["turns"])
    requests = ", ".join(str(run["num_prompts"]) for run in result["turns"][0]["runs"])
    times = "One round" if rounds == 1 else f"Medians of {rounds} interleaved rounds"
    return [
        f"{found['model']} on {found['cores']} cores of {found['cpu']}, Python {found['python']}, JAX {found['versions']['jax']}; load "
        f"average {found['load_average'][0]:.1f} before. {times}, one server at a time; {requests} requests of "
        f"{load['input_len']} prompt tokens and {load['output_len']} output tokens, streamed.",
        "",
        *tables(result),
        "",
        *(f"- {server['name']} {server['version']}: `{server['command']}`" for server in found["servers"]),
        "",
        f"![Output tokens per second and time to first token]({path.with_suffix('.png').as_posix()})",
    ]


if __name__ == "__main__":
    main()
