"""What a comparison's JSON says: medians over the rounds, ratios of them, and both as Markdown."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

OURS = "jaxkv"


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one number over the rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


def names(result: dict[str, Any]) -> list[str]:
    """The servers in the order in which they took turns."""
    return list(dict.fromkeys(turn["server"] for turn in result["turns"]))


def concurrencies(result: dict[str, Any]) -> list[int]:
    return [run["max_concurrency"] for run in result["turns"][0]["runs"]]


def spread(result: dict[str, Any], name: str, concurrency: int, key: str) -> Spread:
    """key: of a run's summary, e.g. output_throughput (tokens/s) or median_ttft_ms."""
    turns = [turn for turn in result["turns"] if turn["server"] == name]
    return Spread.of([run[key] for turn in turns for run in turn["runs"] if run["max_concurrency"] == concurrency])


def start_to_ready(result: dict[str, Any], name: str) -> Spread:
    return Spread.of([turn["start_to_ready_s"] for turn in result["turns"] if turn["server"] == name])


def ratio(result: dict[str, Any], ours: str, peer: str, concurrency: int, key: str) -> float:
    """Of the medians: ours by the peer's."""
    return spread(result, ours, concurrency, key).median / spread(result, peer, concurrency, key).median


def pairs(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Each of ours with each peer."""
    ours = [name for name in names(result) if name.startswith(OURS)]
    return [(own, peer) for own in ours for peer in names(result) if peer not in ours]


def tables(result: dict[str, Any]) -> list[str]:
    """Lines of Markdown: a table of medians, and one of ratios."""
    return [*_medians(result), "", *_ratios(result)]


def _medians(result: dict[str, Any]) -> list[str]:
    limits = concurrencies(result)
    about = {server["name"]: server for server in result["conditions"]["servers"]}
    head = [f"output tokens/s at {limits[0]}", *(str(limit) for limit in limits[1:])]
    lines = _head(["", "weights", *head, f"median TTFT at {limits[-1]}", "start to ready"])
    for name in names(result):
        throughput = [f"{spread(result, name, limit, 'output_throughput').median:.0f}" for limit in limits]
        ttft = spread(result, name, limits[-1], "median_ttft_ms").median / 1000
        cells = [
            name,
            about[name]["weights"],
            *throughput,
            f"{ttft:.2f} s",
            f"{start_to_ready(result, name).median:.1f} s",
        ]
        lines.append(_row(cells))
    return lines


def _ratios(result: dict[str, Any]) -> list[str]:
    limits = concurrencies(result)
    head = [f"output tokens/s at {limits[0]}", *(str(limit) for limit in limits[1:])]
    lines = _head(["", *head, f"median TTFT at {limits[-1]}"])
    for ours, peer in pairs(result):
        throughput = [ratio(result, ours, peer, limit, "output_throughput") for limit in limits]
        ttft = ratio(result, ours, peer, limits[-1], "median_ttft_ms")
        lines.append(_row([f"{ours} / {peer}", *(f"{value:.2f}x" for value in [*throughput, ttft])]))
    return lines


def _head(cells: list[str]) -> list[str]:
    return [_row(cells), "|" + "---|" * len(cells)]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")
