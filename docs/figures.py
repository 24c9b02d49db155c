"""Figures of the documentation: ``python docs/figures.py`` draws them all.

They show small examples, which are computed. The line and the adapters were drawn from
published rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedrot.simulations.report.plots import PALETTE

DOCS = Path(__file__).parent
#: Readable on white and on dark pages.
GREY = "#7f7f7f"
STYLE = {
    **dict.fromkeys(
        (
            "text.color",
            "axes.labelcolor",
            "axes.edgecolor",
            "xtick.color",
            "ytick.color",
        ),
        GREY,
    ),
    "svg.hashsalt": "fedrot",
    "svg.fonttype": "path",
    "font.size": 11,
    "axes.titlesize": 11,
}
Vectors = np.ndarray


def turned(vectors: Vectors, degrees: float) -> Vectors:
    """Return vectors ``[n, 2]``, rotated."""
    angle = np.radians(degrees)
    cosine, sine = np.cos(angle), np.sin(angle)
    return vectors @ np.array([[cosine, sine], [-sine, cosine]])


def rotation() -> Figure:
    """Draw queries and keys of one head of width 2, the same rotated, and the attention
    of both.
    """
    queries, keys = _spread(4, seed=3), _spread(4, seed=4)
    figure, axes = plt.subplots(1, 4, figsize=(9, 2.5), layout="constrained")
    for place, degrees in enumerate((0, 110)):
        q, k = turned(queries, degrees), turned(keys, degrees)
        _arrows(axes[2 * place], [(q, PALETTE[0]), (k, PALETTE[1])])
        scores = np.exp(q @ k.T)
        axes[2 * place + 1].imshow(
            scores / scores.sum(1, keepdims=True), cmap="cividis", vmin=0, vmax=0.8
        )
        axes[2 * place + 1].set(xticks=[], yticks=[], xlabel="keys", ylabel="queries")
        axes[2 * place + 1].set_title(
            "its attention" if not place else "the same attention"
        )
    axes[0].set_title("a head's queries and keys")
    axes[2].set_title("both rotated")
    return figure


def average() -> Figure:
    """Draw the rows of one head of two clients, and their averages."""
    rng = np.random.default_rng(1)
    start = _spread(5, seed=1)
    first, moved = (start + 0.15 * rng.normal(size=(5, 2)) for _ in range(2))
    second = turned(moved, 140)
    left, _, right = np.linalg.svd(second.T @ first)
    aligned = second @ left @ right
    shown = {
        "client A": first,
        "client B: rotated": second,
        "plain average": (first + second) / 2,
        "aligned average": (first + aligned) / 2,
    }
    figure, axes = plt.subplots(1, 4, figsize=(9, 2.5), layout="constrained")
    for ax, (title, rows) in zip(axes, shown.items(), strict=True):
        _arrows(
            ax,
            [(row[None], colour) for row, colour in zip(rows, PALETTE, strict=False)],
        )
        ax.set_title(title)
    return figure


def _spread(count: int, seed: int) -> Vectors:
    """Return vectors ``[count, 2]`` of different lengths in all directions."""
    rng = np.random.default_rng(seed)
    angles = 2 * np.pi * (np.arange(count) + rng.uniform(-0.3, 0.3, count)) / count
    return rng.uniform(0.8, 1.7, (count, 1)) * np.stack(
        [np.cos(angles), np.sin(angles)], axis=1
    )


def _arrows(ax: Axes, given: Sequence[tuple[Vectors, str]]) -> None:
    for vectors, colour in given:
        for x, y in vectors:
            ax.annotate(
                "",
                (x, y),
                (0, 0),
                arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.8},
            )
    ax.set(xlim=(-2, 2), ylim=(-2, 2), xticks=[], yticks=[], aspect="equal")


def permutation() -> Figure:
    """Draw a feed-forward layer, and the same with its neurons in another order."""
    rng = np.random.default_rng(5)
    inputs, outputs = rng.normal(size=(2, 3, 4))
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 2.6), layout="constrained")
    for ax, order, title in zip(
        axes,
        ([0, 1, 2, 3], [2, 0, 3, 1]),
        ("four neurons", "the same in another order"),
        strict=True,
    ):
        for place, neuron in enumerate(order):
            height, colour = 1.5 - place, PALETTE[neuron]
            for end in range(3):
                for x, weight in ((-1, inputs[end, neuron]), (1, outputs[end, neuron])):
                    ax.plot(
                        [x, 0],
                        [1 - end, height],
                        color=colour,
                        lw=0.4 + 1.6 * abs(weight),
                        zorder=1,
                    )
            ax.scatter(0, height, s=260, color=colour, zorder=2)
            ax.text(
                0,
                height,
                "ABCD"[neuron],
                color="white",
                ha="center",
                va="center",
                fontsize=10,
            )
        for x, end in product((-1, 1), range(3)):
            ax.scatter(x, 1 - end, s=120, color=GREY, zorder=2)
        ax.set(xlim=(-1.3, 1.3), ylim=(-2.1, 2.1), title=title)
        ax.axis("off")
    return figure


def stream() -> Figure:
    """Draw the residual stream, which blocks read and write, in other coordinates."""
    figure, ax = plt.subplots(figsize=(8, 2.4), layout="constrained")
    ends = {"embeddings": 0.0, "head": 8.6}
    ax.annotate(
        "",
        (8.1, 0),
        (1.0, 0),
        arrowprops={"arrowstyle": "-|>", "color": PALETTE[0], "lw": 4},
    )
    ax.text(4.3, -0.55, "residual stream  x R", color=PALETTE[0], ha="center")
    boxed = {"boxstyle": "round,pad=0.35", "facecolor": "none", "edgecolor": GREY}
    for name, x in ends.items():
        ax.text(x, 0, name, ha="center", va="center", bbox=boxed)
    for name, x in {"attention": 2.2, "feed-forward": 4.4, "attention ": 6.6}.items():
        ax.text(x, 1.5, name, ha="center", va="center", bbox=boxed)
        for side, word in ((-0.45, "reads Rᵀ"), (0.45, "writes R")):
            ends_at = ((x + side, 1.15), (x + side, 0.1))
            to, start = ends_at if side < 0 else ends_at[::-1]
            ax.annotate(
                "",
                to,
                start,
                arrowprops={"arrowstyle": "-|>", "color": PALETTE[1], "lw": 1.6},
            )
            ax.text(
                x + 1.3 * side,
                0.62,
                word,
                ha="center",
                va="center",
                rotation=90,
                fontsize=9,
            )
    ax.set(xlim=(-1, 9.2), ylim=(-0.9, 2.0))
    ax.axis("off")
    return figure


def anchors() -> Figure:
    """Draw which model each of three updates is aligned to."""
    base, updates = np.zeros(2), np.array([[1.3, 1.3], [2.4, 0.2], [1.1, -1.0]])
    two = updates[:2].mean(0)
    drawn = {
        "global": [(update, base) for update in updates],
        "running": [(updates[0], base), (updates[1], updates[0]), (updates[2], two)],
    }
    means = {"running": {"mean of\n1 and 2": two}}
    figure, axes = plt.subplots(1, 2, figsize=(6, 2.6), layout="constrained")
    for ax, (name, pairs) in zip(axes, drawn.items(), strict=True):
        ax.scatter(*base, s=90, color=GREY)
        ax.text(*base, "broadcast\n", ha="center", va="bottom", fontsize=9)
        for number, update in enumerate(updates, start=1):
            ax.scatter(*update, s=90, color=PALETTE[0])
            ax.text(update[0] + 0.15, update[1], str(number), va="center")
        for word, place in means.get(name, {}).items():
            ax.scatter(*place, s=50, color=PALETTE[2], marker="D")
            ax.text(
                place[0] - 0.15, place[1] - 0.08, word, ha="right", va="top", fontsize=9
            )
        for start, to in pairs:
            ax.annotate(
                "",
                to,
                start,
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": PALETTE[1],
                    "lw": 1.4,
                    "shrinkA": 6,
                    "shrinkB": 6,
                },
            )
        ax.set(xlim=(-0.6, 3.3), ylim=(-1.4, 1.7), title=name)
        ax.axis("off")
    return figure


FIGURES: tuple[Callable[[], Figure], ...] = (
    rotation,
    average,
    permutation,
    stream,
    anchors,
)


def draw(folder: Path) -> None:
    """Write every figure as an SVG file of its name."""
    folder.mkdir(exist_ok=True)
    with plt.rc_context(STYLE):
        for function in FIGURES:
            figure = function()
            figure.savefig(
                folder / f"{function.__name__}.svg",
                transparent=True,
                metadata={"Date": None},
            )
            plt.close(figure)


if __name__ == "__main__":
    draw(DOCS / "assets")
