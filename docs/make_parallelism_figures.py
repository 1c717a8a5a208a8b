"""Draws the figures of docs/parallelism.md from trainer.json and convergence.json of bench/results.

python -m docs.make_parallelism_figures
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes

RESULTS = Path(__file__).parents[1] / "bench" / "results"
PICTURES = Path(__file__).parent / "pictures"
OURS, THEIRS = "#1f6f8b", "#b0b7bf"

Rows = list[dict[str, Any]]


def layouts(axes: Axes, rows: Rows) -> None:
    """Tokens per second of every layout, beside the better form of the baseline."""
    found = [row for row in rows if row["part"] == "loopback"]
    _pairs(
        axes,
        [row["layout"] for row in found],
        [row["tokens_per_s"]["ours"] for row in found],
        [_best_baseline(row["tokens_per_s"]) for row in found],
    )
    axes.set_ylabel("tokens/s, loopback")


def link(axes: Axes, rows: Rows) -> None:
    """The same over a limited link, by how long messages take beside a step without a limit."""
    found = [row for row in rows if row["part"] == "link"]
    tokens = [row["shape"]["batch"] * row["shape"]["seq_len"] for row in found]
    _pairs(
        axes,
        [f"{row['layout']}, messages {row['messages_over_free_step']:g}" for row in found],
        [count / row["median_s"]["ours"] for row, count in zip(found, tokens, strict=True)],
        [
            count / -_best_baseline({name: -s for name, s in row["median_s"].items()})
            for row, count in zip(found, tokens, strict=True)
        ],
    )
    axes.set_ylabel("tokens/s, limited link")


def bubbles(axes: Axes, rows: Rows) -> None:
    """Measured share of a step without work, beside the formula."""
    found = [row for row in rows if row["part"] == "bubble"]
    _pairs(
        axes,
        [f"p={row['stages']} {row['schedule']}" for row in found],
        [100 * statistics.median(row["bubble"]) for row in found],
        [100 * row["theory"] for row in found],
        names=("measured", "theory"),
    )
    axes.set_ylabel("bubble, % of a step")


def windows(axes: Axes, rows: Rows) -> None:
    """Time of attention over the length of the sequence, for full and windowed layers."""
    found = [row for row in rows if row["part"] == "window"]
    for name in ("full", "4096", "1024", "256"):
        points = [
            (row["seq_len"], statistics.median(row["seconds"][name]))
            for row in found
            if name in row["seconds"]
        ]
        axes.plot(
            *zip(*points, strict=True), marker="o", label=name if name == "full" else f"w = {name}"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("s, forward and backward")
    axes.legend(frameon=False)


def convergence(axes: Axes, rows: Rows) -> None:
    """Held-out loss over tokens: what MegaScale changes of the algorithm, means of all seeds."""
    for name in dict.fromkeys(row["variant"] for row in rows):
        runs = [row for row in rows if row["variant"] == name]
        losses = [
            statistics.fmean(at) for at in zip(*(run["held_out"] for run in runs), strict=True)
        ]
        millions = [tokens / 1e6 for tokens in runs[0]["tokens"]]
        axes.plot(millions, losses, "--" if "4 x" in name else "-", label=name, linewidth=1.2)
    axes.set_xlabel("million tokens")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.legend(frameon=False)


FIGURES: Mapping[str, tuple[str, Callable[[Axes, Rows], None]]] = {
    "parallel-layouts": ("trainer", layouts),
    "parallel-link": ("trainer", link),
    "parallel-bubble": ("trainer", bubbles),
    "parallel-window": ("trainer", windows),
    "convergence": ("convergence", convergence),
}


def main() -> None:
    # Without it ids in the file change from run to run.
    mpl.rcParams["svg.hashsalt"] = "outlast"
    mpl.rcParams["font.size"] = 9
    for name, (results, draw) in FIGURES.items():
        rows = json.loads((RESULTS / f"{results}.json").read_text())["rows"]
        figure, axes = pyplot.subplots(figsize=(7.2, 3.0), layout="constrained")
        draw(axes, rows)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)


def _pairs(
    axes: Axes,
    labels: list[str],
    ours: list[float],
    theirs: list[float],
    *,
    names: tuple[str, str] = ("Outlast", "PyTorch-native, better form"),
) -> None:
    places = range(len(labels))
    axes.bar([place - 0.2 for place in places], ours, 0.4, color=OURS, label=names[0])
    axes.bar([place + 0.2 for place in places], theirs, 0.4, color=THEIRS, label=names[1])
    axes.set_xticks(list(places), labels, rotation=25, ha="right")
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))


def _best_baseline(speeds: Mapping[str, float]) -> float:
    return max(value for name, value in speeds.items() if name != "ours")


if __name__ == "__main__":
    main()
