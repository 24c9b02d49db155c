"""Pictures of differences, and of metrics by round."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrot.simulations.report.tables import number, spoken
from fedrot.simulations.summary import CENTRAL, LOWER_IS_BETTER, UNITS, Row, Verdict, paired_difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette for colour-blind readers. Yellow is last, because it is pale.
PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442",
)  # fmt: skip
MARKERS, LINES = "osD^vPX*", ("-", "--", "-.", ":")
#: Perplexities of untrained models are a thousand times those of trained models.
LOGARITHMIC = frozenset({"perplexity", "pseudo_perplexity"})
#: Largest number of characters of a name in a picture.
LONGEST = 32
#: Width in inches of a picture that can be read on a phone.
NARROW = 4.4


def differences_plot(found: Verdict) -> Figure:
    """Draw the judged metrics of all strategies as differences from the reference, with 95 % intervals.

    There is a panel per unit. Beside a strategy's name is the mean of the panel's first metric.
    """
    panels: dict[str, list[str]] = {}
    for metric in found.judged:
        panels.setdefault(UNITS.get(metric, ""), []).append(metric)
    figure, axes = new_figure(len(panels), height=0.32 * len(found.standings) + 0.9)
    for ax, metrics in zip(axes, panels.values(), strict=True):
        _differences(ax, found, metrics)
    return figure


def _differences(ax: Axes, found: Verdict, metrics: Sequence[str]) -> None:
    for index, metric in enumerate(metrics):
        paired = [own.against[metric] for own in found.standings]
        ours = [own is found.reference for own in found.standings]
        means = [0.0 if own else pair.mean for own, pair in zip(ours, paired, strict=True)]
        halves = [math.nan if own else pair.smallest for own, pair in zip(ours, paired, strict=True)]
        places = np.arange(len(means)) + (index - (len(metrics) - 1) / 2) * 0.36
        filled = "white" if index else PALETTE[0]
        look: dict[str, Any] = {"color": PALETTE[index], "mfc": filled, "ms": 6}
        ax.errorbar(
            means, places, xerr=halves, fmt=MARKERS[index], label=as_label(spoken(metric)), **look
        )
    ax.axvline(0, color="0.55", lw=1)
    ax.set_yticks(
        range(len(found.standings)),
        [f"{as_label(own.name)}   {number(own.mean(metrics[0]))}" for own in found.standings],
    )
    for label, own in zip(ax.get_yticklabels(), found.standings, strict=True):
        label.set_fontweight("bold" if own is found.recommended else "normal")
    ax.set_ylim(len(found.standings) - 0.4, -0.6)
    side = "left" if metrics[0] in LOWER_IS_BETTER else "right"
    names = " and ".join(as_label(spoken(metric)) for metric in metrics)
    ax.set_xlabel(f"{names}: difference\nfrom {as_label(found.reference.name)} ({side} is better)")
    if len(metrics) > 1:
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    ax.locator_params(axis="x", nbins=5)
    ax.grid(axis="x", color="0.9", lw=0.8)


def curves_plot(rows: Iterable[Row], metric: str, strategies: Sequence[str]) -> Figure:
    """Draw a metric of the global model by round: a line per strategy, with 95 % t intervals over seeds.

    The place of a strategy in ``strategies`` decides its look. One with a single round is a level line.
    The axis follows the means: an interval may leave the frame.
    """
    series: dict[str, dict[int, list[float]]] = {name: {} for name in strategies}
    for row in rows:
        if row["scope"] == CENTRAL and row["metric"] == metric:
            by_round = series.setdefault(str(row["strategy"]), {})
            value = math.nan if row["value"] is None else float(row["value"])
            by_round.setdefault(int(row["round"]), []).append(value)
    figure, (ax,) = new_figure(height=2.7)
    drawn = np.array([])
    for index, (name, by_round) in enumerate(series.items()):
        # Strategies with one colour and marker differ in their lines.
        colour, marker = PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)]
        look: dict[str, Any] = {
            "color": colour,
            "ls": LINES[(index + index // len(PALETTE)) % len(LINES)],
        }
        rounds = sorted(by_round)
        found = [paired_difference(by_round[r]) for r in rounds]
        mean, half = np.array([(own.mean, own.smallest) for own in found]).reshape(-1, 2).T
        drawn = np.concatenate([drawn, mean[np.isfinite(mean)]])
        if len(rounds) == 1:
            ax.axhline(mean[0], lw=1, **look)
        every = math.ceil((len(rounds) + 1) / 12)
        ax.plot(rounds, mean, label=as_label(name), marker=marker, ms=4.5, markevery=every, **look)
        ax.fill_between(rounds, mean - half, mean + half, color=colour, alpha=0.13, lw=0)
    if metric in LOGARITHMIC and (drawn > 0).any():
        ax.set_yscale("log")
    elif np.ptp(drawn) if len(drawn) else 0:
        room = 0.3 * np.ptp(drawn)
        ax.set_ylim(drawn.min() - room, drawn.max() + room)
    ax.set(xlabel="round", ylabel=as_label(spoken(metric)))
    ax.locator_params(axis="x", integer=True)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, handlelength=3.2)
    return figure


def rounds_plot(series: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw a small panel per metric with its values by round; ``series`` is metric -> round -> value."""
    figure, axes = new_figure(len(series), height=1.5)
    for ax, (name, values) in zip(axes, series.items(), strict=True):
        rounds = sorted(values)
        marker = "o" if len(rounds) <= 30 else ""
        ax.plot(rounds, [values[r] for r in rounds], marker=marker, ms=3, lw=1.4, color=PALETTE[0])
        ax.set_title(as_label(name), loc="left", fontsize="medium")
        ax.locator_params(axis="x", integer=True)
    return figure


def new_figure(rows: int = 1, *, height: float) -> tuple[Figure, list[Any]]:
    """Return a figure and its panels, one below the other; ``height`` is that of a panel, in inches."""
    # pyplot is not used: it chooses a display and keeps global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(NARROW, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, squeeze=False).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9", lw=0.8)
    return figure, axes


def as_label(name: str) -> str:
    """Return a name as text for matplotlib: truncated, and with escaped dollars, which mark formulas."""
    cut = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    return "".join(c if c.isprintable() else " " for c in cut).replace("$", r"\$")


def data_uri(figure: Figure) -> str:
    """Return a figure as an SVG data URI; text stays text, which a browser has glyphs for."""
    import matplotlib

    written = io.BytesIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "fedrot"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(written, format="svg", dpi=200, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(written.getvalue()).decode("ascii")
