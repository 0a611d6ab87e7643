"""A comparison as a picture: what each server reached at each concurrency, medians with the range of the rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.comparison import concurrencies, names, spread

PANELS = (
    ("output_throughput", 1.0, "output tokens per second (more is better)"),
    ("median_ttft_ms", 1e-3, "median time to first token, seconds (less is better)"),
)
COLOURS = ("#1b4f8f", "#6ea6dc", "#d98032", "#6b6b6b", "#8a5fa8", "#3f8f5f")


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes a PNG. Needs matplotlib (the extra `notebook`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, (key, unit, title) in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        _panel(axes, result, key, unit)
        axes.set_title(title, fontsize=10)
    figure.axes[0].legend(frameon=False, fontsize=9)
    found = result["conditions"]
    figure.suptitle(f"{found['model']}, {found['cores']} cores of {found['cpu']}", fontsize=11)
    figure.savefig(path, dpi=130)


def _panel(axes: Any, result: dict[str, Any], key: str, unit: float) -> None:
    limits, servers = concurrencies(result), names(result)
    width = 0.8 / len(servers)
    for i, name in enumerate(servers):
        found = [spread(result, name, limit, key) for limit in limits]
        heights = [one.median * unit for one in found]
        below = [(one.median - one.least) * unit for one in found]
        above = [(one.most - one.median) * unit for one in found]
        places = [at + (i - (len(servers) - 1) / 2) * width for at in range(len(limits))]
        bars = axes.bar(
            places, heights, 0.92 * width, yerr=[below, above], capsize=2, label=name, color=COLOURS[i % len(COLOURS)]
        )
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axes.set_xticks(range(len(limits)), [str(limit) for limit in limits])
    axes.set_xlabel("requests at once")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
