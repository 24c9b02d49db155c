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
from fedrot.simulations.summary import (
    CENTRAL,
    LOWER_IS_BETTER,
    Row,
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
MARKERS, LINES = "osD^vPX*", ("-", "--", "-.", ":")
#: Perplexities of untrained models are a thousand times those of trained models.
LOGARITHMIC = frozenset({"perplexity", "pseudo_perplexity"})
#: Largest number of characters of a name in a picture.
LONGEST = 32
#: Width in inches of a picture that can be read on a phone.
NARROW = 4.4


def differences_plot(found: Verdict) -> Figure:
    """Draw the strategies' differences from the reference, with 95 % intervals: a panel
    per metric.

    Beside a strategy's name is its mean; that of the recommended one is bold.
    """
    places = range(len(found.standings))
    figure, axes = new_figure(len(found.judged), height=0.27 * len(places) + 0.85)
    for ax, metric in zip(axes, found.judged, strict=True):
        pairs = [own.against[metric] for own in found.standings]
        halves = [pair.smallest for pair in pairs]
        ax.errorbar(
            [pair.mean for pair in pairs],
            places,
            xerr=halves,
            fmt="o",
            color=PALETTE[0],
        )
        ax.axvline(0, color="0.55", lw=1)
        names = [
            f"{as_label(own.name)}   {number(own.mean(metric))}"
            for own in found.standings
        ]
        ax.set_yticks(places, names)
        ax.get_yticklabels()[found.standings.index(found.recommended)].set_fontweight(
            "bold"
        )
        ax.set_ylim(len(places) - 0.4, -0.6)
        side = "left" if metric in LOWER_IS_BETTER else "right"
        reference = as_label(found.reference.name)
        ax.set_xlabel(
            f"{as_label(spoken(metric))}: difference\nfrom {reference} ({side} is "
            "better)"
        )
        ax.locator_params(axis="x", nbins=5)
        ax.grid(axis="x", color="0.9", lw=0.8)
    return figure


def curves_plot(rows: Iterable[Row], metric: str, strategies: Sequence[str]) -> Figure:
    """Draw a metric of the global model by round: a line per strategy, with 95 % t
    intervals over seeds.

    The place of a strategy in ``strategies`` decides its look. One with a single round
    is a level line. The axis follows the means: an interval may leave the frame.
    """
    series: dict[str, dict[int, list[float]]] = {name: {} for name in strategies}
    for row in rows:
        if (
            row["scope"] == CENTRAL
            and row["metric"] == metric
            and row["strategy"] in series
        ):
            series[row["strategy"]].setdefault(row["round"], []).append(row["value"])
    figure, (ax,) = new_figure(height=2.7)
    drawn: list[float] = []
    for index, (name, by_round) in enumerate(series.items()):
        # Strategies with one colour and marker differ in their lines.
        line = LINES[(index + index // len(PALETTE)) % len(LINES)]
        look: dict[str, Any] = {"color": PALETTE[index % len(PALETTE)], "ls": line}
        rounds = sorted(by_round)
        found = [paired_difference(by_round[r]) for r in rounds]
        mean, half = (
            np.array([(own.mean, own.smallest) for own in found]).reshape(-1, 2).T
        )
        drawn += [*mean[np.isfinite(mean)]]
        if len(rounds) == 1:
            ax.axhline(mean[0], lw=1, **look)
        look |= {
            "marker": MARKERS[index % len(MARKERS)],
            "markevery": math.ceil((len(rounds) + 1) / 12),
        }
        ax.plot(rounds, mean, label=as_label(name), ms=4.5, **look)
        ax.fill_between(
            rounds, mean - half, mean + half, color=look["color"], alpha=0.13, lw=0
        )
    if metric in LOGARITHMIC and max(drawn, default=0) > 0:
        ax.set_yscale("log")
    elif drawn and np.ptp(drawn):
        room = 0.3 * np.ptp(drawn)
        ax.set_ylim(min(drawn) - room, max(drawn) + room)
    ax.set(xlabel="round", ylabel=as_label(spoken(metric)))
    ax.locator_params(axis="x", integer=True)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, handlelength=3.2)
    return figure


def rounds_plot(series: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Draw a small panel per metric with its values by round; ``series`` is metric ->
    (round, value).
    """
    figure, axes = new_figure(len(series), height=1.5)
    for ax, (name, values) in zip(axes, series.items(), strict=True):
        marker = "o" if len(values) <= 30 else ""
        ax.plot(
            *zip(*values, strict=True), marker=marker, ms=3, lw=1.4, color=PALETTE[0]
        )
        ax.set_title(as_label(name), loc="left", fontsize="medium")
        ax.locator_params(axis="x", integer=True)
    return figure


def new_figure(rows: int = 1, *, height: float) -> tuple[Figure, list[Any]]:
    """Return a figure and its panels, one below the other; ``height`` is that of a
    panel, in inches.
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
    """Return a name as text for matplotlib: truncated, and with escaped dollars, which
    mark formulas.
    """
    cut = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    return "".join(c if c.isprintable() else " " for c in cut).replace("$", r"\$")


def data_uri(figure: Figure) -> str:
    """Return a figure as an SVG data URI; text stays text, which a browser has glyphs
    for.
    """
    import matplotlib

    written = io.BytesIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "fedrot"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(written, format="svg", dpi=200, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(written.getvalue()).decode(
        "ascii"
    )
