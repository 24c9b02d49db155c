"""Pictures of differences, of metrics by round, and of the clients' classes; functions of all pictures."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrot.simulations.report.tables import number, spoken
from fedrot.simulations.summary import (
    CENTRAL,
    LOWER_IS_BETTER,
    UNITS,
    Row,
    Standing,
    Verdict,
    mean_and_half,
)

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
#: Width in inches of a picture that can be read on a phone, and height of a line of names in it.
NARROW, LINE = 4.4, 0.3
#: Grids with more cells than this have no numbers, and more classes than this are added up.
MOST_NUMBERS, MOST_CLASSES = 150, 24


def differences_plot(found: Verdict) -> Figure:
    """Draw the judged metrics of all strategies as differences from the reference, with 95 % intervals.

    There is a panel per unit. Beside a strategy's name is the mean of the panel's first metric.
    """
    panels: dict[str, list[str]] = {}
    for metric in found.judged:
        panels.setdefault(UNITS.get(metric, ""), []).append(metric)
    height = LINE * len(found.standings) + 0.75
    figure, axes = new_figure(len(panels), height=height)
    for ax, metrics in zip(axes, panels.values(), strict=True):
        _differences(ax, found, metrics)
    return figure


def _differences(ax: Axes, found: Verdict, metrics: Sequence[str]) -> None:
    name = found.reference.name if found.reference else ""
    for place, own in enumerate(found.standings):
        for index, metric in enumerate(metrics):
            height = place + (index - (len(metrics) - 1) / 2) * 0.36
            _dot(ax, own, metric, index, height, own is found.reference)
    ax.axvline(0, color="0.55", lw=1)
    for place in range(1, len(found.standings)):
        ax.axhline(place - 0.5, color="0.9", lw=0.8)
    labels = [f"{as_label(s.name)}  {number(s.mean(metrics[0]))}" for s in found.standings]
    ax.set_yticks(range(len(labels)), labels)
    for label, own in zip(ax.get_yticklabels(), found.standings, strict=True):
        label.set_fontweight("bold" if own is found.recommended else "normal")
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.margins(x=0.08)
    side = "left" if metrics[0] in LOWER_IS_BETTER else "right"
    names = " and ".join(map(spoken, metrics))
    ax.set_xlabel(as_label(f"{names}: difference from {name}", 70) + f"\n({side} is better)")
    if len(metrics) > 1:
        marks = [ax.plot([], [], MARKERS[i], **_look(i))[0] for i in range(len(metrics))]
        ax.legend(marks, list(map(spoken, metrics)), loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    ax.grid(axis="x", color="0.9", lw=0.8)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)


def _dot(ax: Axes, own: Standing, metric: str, index: int, height: float, reference: bool) -> None:
    """Draw a difference; the interval is left out if it is unknown, and all of it if it is not finite."""
    paired = own.against[metric]
    value = 0.0 if reference else paired.mean
    if math.isfinite(value):
        if math.isfinite(paired.smallest) and not reference:
            ax.plot([paired.ci_low, paired.ci_high], [height] * 2, "-", color=PALETTE[index], lw=1.6)
        ax.plot([value], [height], MARKERS[index], **_look(index))


def _look(index: int) -> dict[str, Any]:
    return {"color": PALETTE[index], "ms": 5.5, "mfc": "white" if index % 2 else PALETTE[index]}


def curves_plot(rows: Iterable[Row], metric: str, strategies: Sequence[str]) -> Figure:
    """Draw a metric of the global model by round: a line per strategy with its 95 % t interval over seeds.

    The place of a strategy in ``strategies`` decides its look. One with a single round is a level line.
    The axis follows the means: an interval may leave the frame.
    """
    series: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["scope"] == CENTRAL and row["metric"] == metric:
            by_round = series.setdefault(str(row["strategy"]), {})
            by_round.setdefault(int(row["round"]), []).append(float(row["value"]))
    figure, (ax,) = new_figure(height=2.7)
    looks = dict(
        zip(strategies, zip(cycle(PALETTE), cycle(MARKERS), _lines(), strict=False), strict=False)
    )
    means: list[float] = []
    for name in filter(series.__contains__, strategies):
        colour, marker, line = looks[name]
        rounds = sorted(series[name])
        mean, half = np.array([mean_and_half(series[name][r]) for r in rounds]).T
        means += mean[np.isfinite(mean)].tolist()
        if len(rounds) == 1:
            ax.axhline(mean[0], ls=line, color=colour, lw=1)
        style: dict[str, Any] = {"ls": line, "marker": marker, "color": colour, "ms": 4.5, "lw": 1.6}
        ax.plot(rounds, mean, label=as_label(name), markevery=max(1, len(rounds) // 12), **style)
        ax.fill_between(rounds, mean - half, mean + half, color=colour, alpha=0.13, lw=0)
    if metric in LOGARITHMIC and any(value > 0 for value in means):
        ax.set_yscale("log")
    elif means and max(means) > min(means):
        room = 0.3 * (max(means) - min(means))
        ax.set_ylim(min(means) - room, max(means) + room)
    ax.set_xlabel("round")
    ax.set_ylabel(spoken(metric))
    ax.xaxis.get_major_locator().set_params(integer=True)
    below: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (-0.12, -0.2)}
    ax.legend(ncols=2, handlelength=3.2, **below)
    return figure


def _lines() -> Iterable[str]:
    """Yield line styles; those of strategies with the same colour and marker differ."""
    for turn in range(len(LINES) ** 2):
        for index in range(len(PALETTE)):
            yield LINES[(index + turn) % len(LINES)]


def clients_plot(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Figure:
    """Draw the rows of every client (column) and class (line); ``counts`` is [clients][classes].

    Rows of no class have no name. Rare classes are added up above ``MOST_CLASSES``.
    """
    table = np.asarray(counts).T
    labels = [
        names[i] if i < len(names) else "no class" if len(names) else "rows" for i in range(len(table))
    ]
    if len(table) > MOST_CLASSES:
        order = np.argsort(-table.sum(1), kind="stable")
        rest = order[MOST_CLASSES - 1 :]
        table = np.vstack([table[order[: MOST_CLASSES - 1]], table[rest].sum(0)])
        labels = [labels[i] for i in order[: MOST_CLASSES - 1]] + [f"{len(rest)} others"]
    figure, (ax,) = new_figure(height=min(LINE, 6 / len(table)) * len(table) + 0.8)
    image = ax.imshow(table, "Blues", aspect="auto", interpolation="nearest", vmin=0)
    if table.size <= MOST_NUMBERS:
        write_numbers(ax, table, image.to_rgba(table))
    ax.set_yticks(range(len(labels)), list(map(as_label, labels)))
    several = len(counts) <= 12
    clients = [f"{n}\n({sum(own)})" if several else str(n) for n, own in enumerate(counts)]
    every = math.ceil(len(clients) / 12)
    ax.set_xticks(range(0, len(clients), every), clients[::every])
    ax.set_xlabel("client" + (" (all its rows)" if several else ""))
    plain_grid(ax)
    return figure


def rounds_plot(series: Mapping[str, Mapping[int, float]]) -> Figure:
    """Draw a small panel per metric with its values by round; ``series`` is metric -> round -> value."""
    figure, axes = new_figure(len(series), height=1.5)
    for ax, (name, values) in zip(axes, series.items(), strict=True):
        rounds = sorted(values)
        marker = "o" if len(rounds) <= 30 else ""
        ax.plot(rounds, [values[r] for r in rounds], marker=marker, ms=3, lw=1.4, color=PALETTE[0])
        ax.set_title(as_label(name), loc="left")
        ax.xaxis.get_major_locator().set_params(integer=True)
    return figure


def write_numbers(ax: Axes, numbers: np.ndarray, colours: np.ndarray, style: str = ".0f") -> None:
    """Write numbers into the cells of a grid, black on light cells and white on dark ones."""
    for (line, column), value in np.ndenumerate(np.ma.masked_invalid(numbers)):
        if value is not np.ma.masked and value == value:
            light = float(colours[line, column][:3] @ (0.299, 0.587, 0.114)) > 0.55
            shown = f"{value:{style}}".replace("-0", "0")
            place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
            ax.text(column, line, shown, color="black" if light else "white", **place)


def plain_grid(ax: Axes) -> None:
    """Remove ticks, frame and lines of a picture of cells."""
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


def new_figure(rows: int = 1, *, width: float = NARROW, height: float = 3.0) -> tuple[Figure, list[Any]]:
    """Return a figure and its panels, one below the other; ``height`` is that of a panel, in inches."""
    # pyplot is not used: it chooses a display and keeps global state.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height * rows), layout="constrained")
    FigureCanvasSVG(figure)
    axes = list(figure.subplots(rows, squeeze=False).flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9", lw=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def as_label(name: str, longest: int = LONGEST) -> str:
    """Return a name as text for matplotlib: truncated, and with escaped dollars, which mark formulas."""
    cut = name if len(name) <= longest else f"{name[: longest - 1]}…"
    return "".join(c if c.isprintable() else " " for c in cut).replace("$", r"\$")


def data_uri(figure: Figure) -> str:
    """Return a figure as an SVG data URI; text stays text, which a browser has glyphs for."""
    import matplotlib

    style = {"svg.fonttype": "none", "svg.hashsalt": "fedrot", "legend.frameon": False, "font.size": 10}
    written = io.BytesIO()
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(written, format="svg", dpi=200, bbox_inches="tight", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(written.getvalue()).decode("ascii")
