"""Pictures of differences, of metrics by round, of the clients' classes, and of alignment."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrot.report import shares_by
from fedrot.simulations.report.tables import number, spoken
from fedrot.simulations.summary import CENTRAL, LOWER_IS_BETTER, Row, Verdict, paired_difference
from fedrot.symmetry import NO_LAYER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette for colour-blind readers. Yellow is last, because it is pale.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442"]
MARKERS, LINES = "osD^vPX*", ("-", "--", "-.", ":")
#: Perplexities of untrained models are a thousand times those of trained models.
LOGARITHMIC = frozenset({"perplexity", "pseudo_perplexity"})
#: Largest number of characters of a name in a picture.
LONGEST = 32
#: Width in inches of a picture that can be read on a phone.
NARROW = 4.4
#: Grids with more cells have no numbers; an axis of a grid has at most so many names.
MOST_NUMBERS, MOST_NAMES = 150, 40
#: Percentages found by alignment with a smaller absolute value are shown as 0.
NOTHING = 0.5


def differences_plot(found: Verdict) -> Figure:
    """Draw the strategies' differences from the reference, with 95 % intervals: a panel per metric.

    Beside a strategy's name is its mean; that of the recommended one is bold.
    """
    places = range(len(found.standings))
    figure, axes = new_figure(len(found.judged), height=0.27 * len(places) + 0.85)
    for ax, metric in zip(axes, found.judged, strict=True):
        pairs = [own.against[metric] for own in found.standings]
        halves = [pair.smallest for pair in pairs]
        ax.errorbar([pair.mean for pair in pairs], places, xerr=halves, fmt="o", color=PALETTE[0])
        ax.axvline(0, color="0.55", lw=1)
        names = [f"{as_label(own.name)}   {number(own.mean(metric))}" for own in found.standings]
        ax.set_yticks(places, names)
        ax.get_yticklabels()[found.standings.index(found.recommended)].set_fontweight("bold")
        ax.set_ylim(len(places) - 0.4, -0.6)
        side = "left" if metric in LOWER_IS_BETTER else "right"
        reference = as_label(found.reference.name)
        ax.set_xlabel(f"{as_label(spoken(metric))}: difference\nfrom {reference} ({side} is better)")
        ax.locator_params(axis="x", nbins=5)
        ax.grid(axis="x", color="0.9", lw=0.8)
    return figure


def curves_plot(rows: Iterable[Row], metric: str, strategies: Sequence[str]) -> Figure:
    """Draw a metric of the global model by round: a line per strategy, with 95 % t intervals over seeds.

    The place of a strategy in ``strategies`` decides its look. One with a single round is a level line.
    The axis follows the means: an interval may leave the frame.
    """
    series: dict[str, dict[int, list[float]]] = {name: {} for name in strategies}
    for row in rows:
        if row["scope"] == CENTRAL and row["metric"] == metric and row["strategy"] in series:
            series[row["strategy"]].setdefault(row["round"], []).append(row["value"])
    figure, (ax,) = new_figure(height=2.7)
    drawn: list[float] = []
    for index, (name, by_round) in enumerate(series.items()):
        # Strategies with one colour and marker differ in their lines.
        line = LINES[(index + index // len(PALETTE)) % len(LINES)]
        look: dict[str, Any] = {"color": PALETTE[index % len(PALETTE)], "ls": line}
        rounds = sorted(by_round)
        found = [paired_difference(by_round[r]) for r in rounds]
        mean, half = np.array([(own.mean, own.smallest) for own in found]).reshape(-1, 2).T
        drawn += [*mean[np.isfinite(mean)]]
        if len(rounds) == 1:
            ax.axhline(mean[0], lw=1, **look)
        look |= {"marker": MARKERS[index % len(MARKERS)], "markevery": math.ceil((len(rounds) + 1) / 12)}
        ax.plot(rounds, mean, label=as_label(name), ms=4.5, **look)
        ax.fill_between(rounds, mean - half, mean + half, color=look["color"], alpha=0.13, lw=0)
    if metric in LOGARITHMIC and max(drawn, default=0) > 0:
        ax.set_yscale("log")
    elif drawn and np.ptp(drawn):
        room = 0.3 * np.ptp(drawn)
        ax.set_ylim(min(drawn) - room, max(drawn) + room)
    ax.set(xlabel="round", ylabel=as_label(spoken(metric)))
    ax.locator_params(axis="x", integer=True)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, handlelength=3.2)
    return figure


def clients_plot(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Figure:
    """Draw the rows of every class (line) and client (column); ``counts`` is [clients][classes].

    Rows of no class have no name.
    """
    table = np.asarray(counts).T
    lines = [names[i] if i < len(names) else "no class" if names else "rows" for i in range(len(table))]
    figure, (ax,) = new_figure(height=min(0.3 * len(table), 7) + 0.8)
    image = ax.imshow(table, "Blues", aspect="auto", interpolation="nearest", vmin=0)
    several = len(counts) > 10
    clients = [str(n) if several else f"{n}\n({sum(own)})" for n, own in enumerate(counts)]
    name_cells(ax, lines, clients, "client" if several else "client (all its rows)")
    if table.size <= MOST_NUMBERS:
        write_numbers(ax, table, image.to_rgba(table))
    return figure


def rounds_plot(series: Mapping[str, Sequence[tuple[int, float]]]) -> Figure:
    """Draw a small panel per metric with its values by round; ``series`` is metric -> (round, value)."""
    figure, axes = new_figure(len(series), height=1.5)
    for ax, (name, values) in zip(axes, series.items(), strict=True):
        marker = "o" if len(values) <= 30 else ""
        ax.plot(*zip(*values, strict=True), marker=marker, ms=3, lw=1.4, color=PALETTE[0])
        ax.set_title(as_label(name), loc="left", fontsize="medium")
        ax.locator_params(axis="x", integer=True)
    return figure


def heat_map(rows: Iterable[Row]) -> Figure:
    """Draw the share of the squared distance found: a line per part and layer, a column per round.

    Distances are summed over clients, seeds and groups before they are divided. Colours have the same
    meaning in every picture. The rows are of one strategy, with ``round``, ``part``, ``layer``,
    ``before``, ``after``, ``moved``, ``found`` and optionally ``chance``.
    """
    from matplotlib.colors import LinearSegmentedColormap

    cells = shares_by(rows, lambda row: (str(row["part"]), int(row["layer"]), int(row["round"])))
    parts = list(dict.fromkeys(part for part, _, _ in cells))
    lines = sorted({key[:2] for key in cells}, key=lambda line: (parts.index(line[0]), line[1]))
    columns = sorted({n for _, _, n in cells})
    shares, beyond = np.full((2, len(lines), len(columns)), math.nan)
    for (part, layer, n), own in cells.items():
        place = lines.index((part, layer)), columns.index(n)
        shares[place] = 100 * own.share if 100 * abs(own.share) >= NOTHING else 0.0
        chance = own.chance is not None and own.ratio <= 1
        beyond[place] = math.nan if chance or not shares[place] else shares[place]
    width = min(NARROW, 2.6 + 0.42 * len(columns))
    figure, (ax,) = new_figure(width=width, height=min(0.25 * len(lines), 10) + 0.8)
    purple = LinearSegmentedColormap.from_list("share", ("#E6E2F0", "#6A51A3", "#3F007D"))
    colours = purple.with_extremes(bad="0.85", under="#D55E00")
    image = ax.imshow(beyond, colours, aspect="auto", interpolation="nearest", vmin=0, vmax=50)
    drawn = image.to_rgba(np.ma.masked_invalid(beyond))
    # Cells without a row are white.
    ax.imshow(np.where(np.isnan(shares), 1.0, math.nan), "binary_r", aspect="auto", vmin=0, vmax=1)
    if shares.size <= MOST_NUMBERS:
        write_numbers(ax, shares, drawn)
    bar = figure.colorbar(image, ax=ax, extend="both", label="share (%)", pad=0.03)
    bar.outline.set_visible(False)
    names = [part if layer == NO_LAYER else f"{part}, layer {layer}" for part, layer in lines]
    name_cells(ax, names, list(map(str, columns)), "round")
    return figure


def name_cells(ax: Axes, lines: Sequence[str], columns: Sequence[str], below: str) -> None:
    """Name the lines and columns of a picture of cells, at most ``MOST_NAMES`` of each."""
    lines = [*map(as_label, lines)]
    for axis, names, most in ((ax.yaxis, lines, MOST_NAMES), (ax.xaxis, columns, MOST_NAMES // 3)):
        every = math.ceil(len(names) / most)
        axis.set_ticks(range(0, len(names), every), names[::every])
    ax.set_xlabel(below)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)


def write_numbers(ax: Axes, numbers: np.ndarray, colours: np.ndarray) -> None:
    """Write numbers into cells, black on light ones and white on dark ones; NaN is left out."""
    for (line, column), value in np.ndenumerate(numbers):
        if not math.isnan(value):
            light = float(colours[line, column][:3] @ (0.299, 0.587, 0.114)) > 0.55
            place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
            ax.text(column, line, f"{value:.0f}", color="black" if light else "white", **place)


def new_figure(rows: int = 1, *, width: float = NARROW, height: float = 3.0) -> tuple[Figure, list[Any]]:
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
