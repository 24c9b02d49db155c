"""Figures of the documentation, drawn from published rows: ``python docs/figures.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

from fedrot.simulations.barrier.barrier_lines import BarrierLine, lines_of
from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.report.plots import PALETTE

DOCS = Path(__file__).parent
#: Readable on white and on dark pages.
GREY = "#7f7f7f"


def line_figure(path: Path) -> None:
    """Draw the loss on the line between two GPT-2s: every pair, and the mean of the pairs."""
    lines = lines_of(read_rows(DOCS / "results" / "stream-barriers"))
    style = {"text.color": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY}
    plain = {"svg.hashsalt": "fedrot", "svg.fonttype": "path", "font.size": 11, "axes.edgecolor": GREY}
    with plt.rc_context({**style, **plain}):
        figure, ax = plt.subplots(figsize=(6.4, 3.0), layout="constrained")
        _draw(ax, [line for line in lines if line.method == "vanilla"], PALETTE[1], "plain average")
        _draw(ax, [line for line in lines if line.method == "stream"], PALETTE[0], "aligned average")
        ax.set_xticks([0, 0.5, 1], ["client A", "average", "client B"])
        ax.set_ylabel("loss on held-out rows")
        ax.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


def _draw(ax: plt.Axes, lines: list[BarrierLine], colour: str, name: str) -> None:
    barriers = [line.barrier for line in lines if line.cell == "gpt2-disjoint"]
    losses = [[row["loss"] for row in barrier.rows] for barrier in barriers]
    for loss in losses:
        ax.plot(barriers[0].positions, loss, color=colour, lw=0.8, alpha=0.35)
    mean = [sum(values) / len(values) for values in zip(*losses, strict=True)]
    ax.plot(barriers[0].positions, mean, color=colour, lw=2.5)
    middle = len(mean) // 2
    ax.annotate(
        f"{name}: {mean[middle]:.2f}",
        (0.5, mean[middle]),
        (0, 8),
        textcoords="offset points",
        ha="center",
        color=colour,
    )


if __name__ == "__main__":
    (DOCS / "assets").mkdir(exist_ok=True)
    line_figure(DOCS / "assets" / "line.svg")
