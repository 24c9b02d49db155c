"""Pictures of differences and of metrics by round."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrot.errors import legible
from fedrot.simulations.comparison.paired import LOWER_IS_BETTER, paired_difference
from fedrot.simulations.comparison.summary import CENTRAL, Verdict
from fedrot.simulations.report.tables import number, spoken
from fedrot.simulations.run_folder import FIELDS, Row

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
#: One for each colour.
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":")
#: Perplexities of untrained models are a thousand times those of trained models.
LOGARITHMIC = frozenset({"perplexity", "pseudo_perplexity"})
#: Largest number of characters of a name in a picture.
LONGEST = 32
#: Rounds and values of metrics by name.
Series = Mapping[str, Sequence[tuple[int, float]]]
#: Width in inches of a picture that can be read on a phone.
NARROW = 4.4


def differences_plot(verdict: Verdict) -> Figure:
    """Draw the strategies' differences from the reference: a panel per metric.

    Bars are 95 % intervals. Beside a strategy's name is its mean; that of the
    recommended one is bold.
    """
    standings = verdict.standings
    places = range(len(standings))
    figure, panels = new_figure(verdict.judged, height=0.27 * len(places) + 0.85)
    for metric, ax in panels.items():
        pairs = [standing.against[metric] for standing in standings]
        ax.errorbar(
            [pair.mean for pair in pairs],
            places,
            xerr=[pair.smallest for pair in pairs],
            fmt="o",
            color=PALETTE[0],
        )
        ax.axvline(0, color="0.55", lw=1)
        ax.set_yticks(
            places,
            [
                f"{as_label(standing.name)}   {number(standing.mean(metric))}"
                for standing in standings
            ],
        )
        labels = ax.get_yticklabels()
        labels[standings.index(verdict.recommended)].set_fontweight("bold")
        ax.set_ylim(len(places) - 0.4, -0.6)
        side = "left" if metric in LOWER_IS_BETTER else "right"
        ax.set_xlabel(
            f"{as_label(spoken(metric))}: difference\n"
            f"from {as_label(verdict.reference.name)} ({side} is better)"
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
    import pandas

    frame = pandas.DataFrame(rows, columns=FIELDS)
    frame = frame[(frame["scope"] == CENTRAL) & (frame["metric"] == metric)]
    figure, panels = new_figure([metric], height=2.7)
    ax = panels[metric]
    drawn: list[float] = []
    for index, name in enumerate(strategies):
        by_round = frame[frame["strategy"] == name].groupby("round")["value"]
        pairs = by_round.agg(list).map(paired_difference)
        rounds = [*pairs.index]
        means = np.array([pair.mean for pair in pairs])
        halves = np.array([pair.smallest for pair in pairs])
        drawn += [*means[np.isfinite(means)]]
        turn, place = divmod(index, len(PALETTE))
        # Strategies with one colour and marker differ in their lines.
        look = {"color": PALETTE[place], "ls": LINES[(index + turn) % len(LINES)]}
        if len(rounds) == 1:
            ax.axhline(means[0], lw=1, **look)
        ax.plot(
            rounds,
            means,
            label=as_label(name),
            ms=4.5,
            marker=MARKERS[place],
            # At most a dozen markers: the lines stay visible.
            markevery=ceil((len(rounds) + 1) / 12),
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


def sites_plot(
    pairs: Mapping[str, tuple[float, float]], metric: str, ends: tuple[str, str]
) -> Figure:
    """Draw a line for each site, from alone to federated.

    Args:
        pairs: the values of each site, by name.
        ends: what the values are of.
    """
    places = range(len(pairs))
    figure, panels = new_figure([metric], height=0.27 * len(places) + 1.1)
    ax = panels[metric]
    values = [*zip(*pairs.values(), strict=True)]
    ax.hlines(places, *values, color="0.7")
    for end, name in enumerate(ends):
        ax.plot(
            values[end],
            places,
            MARKERS[end],
            color=PALETTE[end],
            label=as_label(name),
        )
    ax.set_yticks(places, map(as_label, pairs))
    ax.invert_yaxis()
    ax.set_xlabel(spoken(metric))
    figure.legend(loc="outside lower left", ncols=2, frameon=False)
    return figure


def rounds_plot(series: Series) -> Figure:
    """Draw a small panel per metric."""
    figure, panels = new_figure(series, height=1.5)
    for name, ax in panels.items():
        values = series[name]
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


def new_figure(names: Collection[str], height: float) -> tuple[Figure, dict[str, Any]]:
    """Return a figure and its panels by name, one below the other.

    ``height`` is that of a panel, in inches.
    """
    # pyplot is not used: it chooses a display and keeps global state.
    from matplotlib.figure import Figure

    rows = len(names)
    figure = Figure(figsize=(NARROW, height * rows), layout="constrained")
    axes = figure.subplots(rows, squeeze=False).flatten()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9", lw=0.8)
    return figure, dict(zip(names, axes, strict=True))


def as_label(name: str) -> str:
    """Return a name as text for matplotlib, truncated.

    Dollars are escaped, because they mark formulas.
    """
    if len(name) > LONGEST:
        name = f"{name[: LONGEST - 1]}…"
    return legible(name).replace("$", r"\$")


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
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode()}"
