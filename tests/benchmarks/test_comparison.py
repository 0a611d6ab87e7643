"""Medians, ratios and tables of a comparison, worked out by hand; and README says what its JSON says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.comparison import pairs, ratio, spread, start_to_ready, tables
from benchmarks.picture import draw
from benchmarks.readme_table import README, ROOT, filled

SPEEDS = {
    "jaxkv bfloat16": [(10.0, 100.0), (30.0, 300.0), (20.0, 200.0)],
    "jaxkv int8": [(40.0, 400.0), (40.0, 400.0), (40.0, 400.0)],
    "vLLM": [(16.0, 90.0), (15.0, 100.0), (17.0, 160.0)],
}


def result() -> dict[str, Any]:
    """Three rounds of three servers at two concurrencies, in the order in which they would be measured."""
    turns = []
    for number in range(3):
        for name, speeds in SPEEDS.items():
            runs = [
                {
                    "max_concurrency": limit,
                    "num_prompts": 12 * limit,
                    "output_throughput": speed,
                    "median_ttft_ms": 1e5 / speed,
                }
                for limit, speed in zip((1, 8), speeds[number], strict=True)
            ]
            turns.append({"round": number + 1, "server": name, "start_to_ready_s": 5.0 + number, "runs": runs})
    servers = [{"name": name, "version": "1.0", "weights": name.split()[-1], "command": "serve --x"} for name in SPEEDS]
    conditions = {
        "model": "tiny",
        "cpu": "Some CPU",
        "cores": 2,
        "python": "3.12.1",
        "versions": {"jax": "0.12"},
        "load_average": [0.25, 0.0, 0.0],
        "load": {"input_len": 128, "output_len": 64},
        "servers": servers,
    }
    return {"conditions": conditions, "turns": turns}


def test_medians_and_ratios() -> None:
    found = spread(result(), "jaxkv bfloat16", 8, "output_throughput")
    assert (found.median, found.least, found.most) == (200.0, 100.0, 300.0)
    assert start_to_ready(result(), "vLLM").median == 6.0
    assert ratio(result(), "jaxkv bfloat16", "vLLM", 1, "output_throughput") == 20 / 16
    assert ratio(result(), "jaxkv int8", "vLLM", 8, "median_ttft_ms") == pytest.approx(0.25)
    assert pairs(result()) == [("jaxkv bfloat16", "vLLM"), ("jaxkv int8", "vLLM")]


def test_tables() -> None:
    assert tables(result()) == [
        "| | weights | output tokens/s at 1 | 8 | median TTFT at 8 | start to ready |",
        "|---|---|---|---|---|---|",
        "| jaxkv bfloat16 | bfloat16 | 20 | 200 | 0.50 s | 6.0 s |",
        "| jaxkv int8 | int8 | 40 | 400 | 0.25 s | 6.0 s |",
        "| vLLM | vLLM | 16 | 100 | 1.00 s | 6.0 s |",
        "",
        "| | output tokens/s at 1 | 8 | median TTFT at 8 |",
        "|---|---|---|---|",
        "| jaxkv bfloat16 / vLLM | 1.25x | 2.00x | 0.50x |",
        "| jaxkv int8 / vLLM | 2.50x | 4.00x | 0.25x |",
    ]


def test_a_block_is_written_between_its_markers(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(result()))
    opening = "<!-- comparison of r.json, written by x.py -->"
    before = f"above\n{opening}\nold\nlines\n<!-- end of comparison -->\nbelow\n"
    text = filled(before, tmp_path)
    assert text.startswith(f"above\n{opening}\ntiny on 2 cores of Some CPU")
    assert text.endswith("(r.png)\n<!-- end of comparison -->\nbelow\n")
    assert "old" not in text
    assert "Medians of 3 interleaved rounds" in text
    assert "load average 0.2 before" in " ".join(text.split())
    assert "- vLLM 1.0: `serve --x`" in text
    assert filled(text, tmp_path) == text


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw(result(), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_readme_says_what_its_json_says() -> None:
    text = README.read_text(encoding="utf-8")
    assert "<!-- comparison of " in text
    assert filled(text) == text, "run python benchmarks/readme_table.py"
    pictures = [line for line in text.splitlines() if line.startswith("![Output tokens")]
    assert all((ROOT / line[line.index("(") + 1 : -1]).exists() for line in pictures)
