"""Pictures of differences and of metrics by round."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrot.simulations.report.tables import number, spoken
from fedrot.simulations.run_folder import Row
from fedrot.simulations.summary import (
    CENTRAL,
    LOWER_IS_BETTER,
    Verdict,
    paired_difference,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette for colour-blind readers. Yellow is last, because it is pale.
PALETTE = [
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#000000",
    "#F0E442",
]
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":")
#: Perplexities of untrained models are a thousand times those of trained models.
LOGARITHMIC = frozenset({"perplexity", "pseudo_perplexity"})
#: Largest number of characters of a name in a picture.
LONGEST = 32
#: Width in inches of a picture that can be read on a phone.
NARROW = 4.4


def differences_plot(verdict: Verdict) -> Figure:
    """Draw the strategies' differences from the reference: a panel per metric.

    Bars are 95 % intervals. Beside a strategy's name is its mean; that of the
    recommended one is bold.
    """
    standings = verdict.standings
    recommended = standings.index(verdict.recommended)
    places = range(len(standings))
    figure, axes = new_figure(len(verdict.judged), height=0.27 * len(places) + 0.85)
    for ax, metric in zip(axes, verdict.judged, strict=True):
        pairs = [standing.against[metric] for standing in standings]
        ax.errorbar(
            [pair.mean for pair in pairs],
            places,
            xerr=[pair.smallest for pair in pairs],
            fmt="o",
            color=PALETTE[0],
        )
        ax.axvline(0, color="0.55", lw=1)
        labels = [
            f"{as_label(standing.name)}   {number(standing.mean(metric))}"
            for standing in standings
        ]
        ax.set_yticks(places, labels)
        ax.get_yticklabels()[recommended].set_fontweight("bold")
        ax.set_ylim(len(places) - 0.4, -0.6)
        side = "left" if metric in LOWER_IS_BETTER else "right"
        reference = as_label(verdict.reference.name)
        ax.set_xlabel(
            f"{as_label(spoken(metric))}: difference\n"
            f"from {reference} ({side} is better)"
        )
        ax.locator_params(axis="x", nbins=5)
        ax.grid(axis="x", color="0.9", lw=0.8)
    return figure


def curves_plot(rows: Iterable[Row], metric: str, strategies: Sequence[str]) -> Figure:
    """Draw a metric of the global model by round: a line per strategy.

    Areas are 95 % t intervals over seeds. The place of a strategy in ``strategies``
    decides its look. One with a single round is a level line. The axis follows the
    means: an interval may leave the frame.
    """
    series: dict[str, dict[int, list[float]]] = {name: {} for name in strategies}
    for row in rows:
        shown = row["scope"] == CENTRAL and row["metric"] == metric
        if shown and row["strategy"] in series:
            by_round = series[row["strategy"]]
            by_round.setdefault(row["round"], []).append(row["value"])
    figure, (ax,) = new_figure(height=2.7)
    drawn: list[float] = []
    for index, (name, by_round) in enumerate(series.items()):
        rounds = sorted(by_round)
        pairs = [paired_difference(by_round[round_]) for round_ in rounds]
        means = np.array([pair.mean for pair in pairs])
        halves = np.array([pair.smallest for pair in pairs])
        drawn += [*means[np.isfinite(means)]]
        look = _look(index)
        if len(rounds) == 1:
            ax.axhline(means[0], lw=1, **look)
        ax.plot(
            rounds,
            means,
            label=as_label(name),
            ms=4.5,
            marker=MARKERS[index % len(MARKERS)],
            # At most a dozen markers: the lines stay visible.
            markevery=math.ceil((len(rounds) + 1) / 12),
            **look,
        )
        ax.fill_between(
            rounds,
            means - halves,
            means + halves,
            color=look["color"],
            alpha=0.13,
            lw=0,
        )
    if metric in LOGARITHMIC and max(drawn, default=0) > 0:
        ax.set_yscale("log")
    elif drawn and np.ptp(drawn):
        room = 0.3 * np.ptp(drawn)
        ax.set_ylim(min(drawn) - room, max(drawn) + room)
    ax.set(xlabel="round", ylabel=as_label(spoken(metric)))
    ax.locator_params(axis="x", integer=True)
    figure.legend(
        loc="outside lower left",
        ncols=2,
        frameon=False,
        handlelength=3.2,
    )
    return figure


def _look(index: int) -> dict[str, Any]:
    """Return the colour and line of the strategy at a place."""
    colours = len(PALETTE)
    # Strategies with one colour and marker differ in their lines.
    line = LINES[(index + index // colours) % len(LINES)]
    return {"color": PALETTE[index % colours], "ls": line}


def rounds_plot(series: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Draw a small panel per metric; ``series`` is metric -> (round, value)."""
    figure, axes = new_figure(len(series), height=1.5)
    for ax, (name, values) in zip(axes, series.items(), strict=True):
        ax.plot(
            *zip(*values, strict=True),
            marker="o" if len(values) <= 30 else "",
            ms=3,
            lw=1.4,
            color=PALETTE[0],
        )
        ax.set_title(as_label(name), loc="left", fontsize="medium")
        ax.locator_params(axis="x", integer=True)
    return figure


def new_figure(rows: int = 1, *, height: float) -> tuple[Figure, list[Any]]:
    """Return a figure and its panels, one below the other.

    ``height`` is that of a panel, in inches.
    """
    # pyplot is not used: it chooses a display and keeps global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(NARROW, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, squeeze=False).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9", lw=0.8)
    return figure, axes


def as_label(name: str) -> str:
    """Return a name as text for matplotlib, truncated.

    Dollars are escaped, because they mark formulas.
    """
    if len(name) > LONGEST:
        name = f"{name[: LONGEST - 1]}…"
    printable = [letter if letter.isprintable() else " " for letter in name]
    return "".join(printable).replace("$", r"\$")


def data_uri(figure: Figure) -> str:
    """Return a figure as an SVG data URI.

    Text stays text: a browser has glyphs for it.
    """
    import matplotlib

    written = io.BytesIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "fedrot"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(written, format="svg", dpi=200, metadata={"Date": None})
    encoded = base64.b64encode(written.getvalue()).decode("ascii")
    return f"data:image/svg+xml;base64,{encoded}"
