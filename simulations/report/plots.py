"""Plots of partitions and of metrics by round, and common functions of plots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fedrot._io import replacing
from fedrot.simulations.federation.run_folder import CENTRAL
from fedrot.simulations.report.summaries import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette for colour-blind readers. Yellow is last, because it is pale.
PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442",
)  # fmt: skip
MARKERS = "osD^vPX*"
# The perplexity of untrained models is a thousand times that of trained models.
LOGARITHMIC = frozenset({"perplexity", "pseudo_perplexity"})
#: Largest number of characters of a name in a picture.
LONGEST = 80
#: Width in inches of a picture that can be read on a phone.
NARROW = 5.0
LINES = ("-", "--", "-.", ":")

#: Start -> arm -> round -> seed -> value.
Series: TypeAlias = dict[str, dict[str, dict[int, dict[int, float]]]]


def partition_plot(path: Path, counts: Sequence[Sequence[int]], names: Sequence[str]) -> Path:
    """Draw stacked bars of the rows per client and class (``names``); ``counts`` [clients][classes]."""
    table = np.asarray(counts)
    clients = np.arange(len(table))
    figure, axes = new_figure(1, 1, width=max(6.0, min(12.0, 3.5 + 0.45 * len(table))))
    ax = axes[0][0]
    base = np.zeros(len(table))
    for index, column in enumerate(table.T):
        name = names[index] if index < len(names) else "none"
        colour = _colour(index, table.shape[1])
        ax.bar(
            clients, column, 0.75, base, label=as_label(name), color=colour, edgecolor="white", lw=0.4
        )
        base += column
    if len(table) <= 20:
        ax.set_xticks(clients, [str(client) for client in clients])
    ax.set_xlabel("client")
    ax.set_ylabel("rows")
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return save_figure(figure, path)


def metric_plot(path: Path, rows: Iterable[Row], metric: str, arms: Sequence[str]) -> Path:
    """Draw the central ``metric`` by round: a line per arm (mean, band ± sd), a panel per start.

    With a single round, each arm has a point for the mean and a bar per seed. The rows are of one
    setting; ``arms`` are all its arms, whose order decides their colours.
    """
    series: Series = {}
    for row in rows:
        if row["scope"] == CENTRAL and row["metric"] == metric:
            by_arm = series.setdefault(str(row["start"]), {})
            by_round = by_arm.setdefault(str(row["arm"]), defaultdict(dict))
            by_round[int(row["round"])][int(row["seed"])] = float(row["value"])
    rounds = {r for by_arm in series.values() for by_round in by_arm.values() for r in by_round}
    if max(rounds) <= 1:
        return _points(path, series, max(rounds), metric, arms)
    figure, axes = new_figure(len(series), 1, width=NARROW, sharey=True)
    for ax, (start, by_arm) in zip(axes.flat, series.items(), strict=True):
        for arm, by_round in by_arm.items():
            _band(ax, by_round, arm, arms.index(arm))
        ax.set_title(as_label(f"start: {start}"), loc="left")
        ax.set_xlabel("round")
        _whole_numbers(ax)
    for ax in axes.flat:
        name_metric(ax, metric)
    shared_legend(figure, axes.flat)
    return save_figure(figure, path)


def rounds_plot(path: Path, series: Mapping[str, Mapping[int, float]]) -> Path:
    """Draw a small panel per metric with its values by round; ``series`` is metric -> round -> value."""
    across = min(3, len(series))
    down = -(-len(series) // across)
    figure, axes = new_figure(down, across, width=4.0 * across, height=2.0)
    for ax in axes.flat[len(series) :]:
        ax.set_axis_off()
    for ax, (name, values) in zip(axes.flat, series.items(), strict=False):
        rounds = sorted(values)
        marker = "o" if len(rounds) <= 30 else ""
        ax.plot(rounds, [values[r] for r in rounds], marker=marker, ms=3, lw=1.4, color=PALETTE[0])
        ax.set_title(as_label(name), loc="left", fontsize="small")
        ax.tick_params(labelsize="small")
        _whole_numbers(ax)
    return save_figure(figure, path)


def _points(path: Path, series: Series, final: int, metric: str, arms: Sequence[str]) -> Path:
    height = 1.2 + 0.28 * len(arms)
    figure, axes = new_figure(len(series), 1, width=NARROW, height=height, sharey=True)
    for ax, (start, by_arm) in zip(axes.flat, series.items(), strict=True):
        for arm, by_round in by_arm.items():
            values = list(by_round.get(final, {}).values())
            place = [-arms.index(arm)] * len(values)
            ax.plot(values, place, "|", color="0.6", ms=9)
            if values:
                ax.plot(np.mean(values), place[0], "o", color=PALETTE[0], ms=6)
        ax.set_yticks([-index for index in range(len(arms))], list(map(as_label, arms)))
        ax.set_title(as_label(f"start: {start}"), loc="left")
        ax.set_xlabel(
            f"{as_label(metric.replace('_', ' '))} after round {final} (bars: seeds, dot: mean)"
        )
        ax.grid(axis="x", color="0.9", lw=0.8)
    return save_figure(figure, path)


def _band(ax: Axes, by_round: dict[int, dict[int, float]], arm: str, index: int) -> None:
    rounds = sorted(by_round)
    values = [list(by_round[r].values()) for r in rounds]
    mean = np.array([np.mean(v) for v in values])
    sd = np.array([np.std(v, ddof=1) if len(v) > 1 else 0.0 for v in values])
    colour = _colour(index, len(PALETTE))
    # Arms with one colour and marker differ in their lines.
    marker, line = MARKERS[index % len(MARKERS)], LINES[(index + index // len(PALETTE)) % len(LINES)]
    ax.plot(rounds, mean, line, marker=marker, color=colour, label=as_label(arm), ms=4, lw=1.6)
    ax.fill_between(rounds, mean - sd, mean + sd, color=colour, alpha=0.15, lw=0)


def _colour(index: int, of: int) -> Any:
    import matplotlib

    if of <= len(PALETTE):
        return PALETTE[index % len(PALETTE)]
    return matplotlib.colormaps["cividis"](index / max(1, of - 1))


def new_figure(
    rows: int, columns: int, *, width: float | None = None, height: float = 3.4, sharey: bool = False
) -> tuple[Figure, Any]:
    """Return a figure and its panels ``[rows][columns]``; ``height`` is that of a row, in inches."""
    # pyplot is not used: it chooses a display and keeps global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width or 1.2 + 3.8 * max(columns, 1.3), height * rows), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="0.9", lw=0.8)
        ax.set_axisbelow(True)
    return figure, axes


def as_label(name: str) -> str:
    """Return a name as text for matplotlib: truncated, and with escaped dollars, which mark formulas."""
    cut = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    return "".join(c if c.isprintable() else " " for c in cut).replace("$", r"\$")


def name_metric(ax: Axes, metric: str) -> None:
    """Label the vertical axis with a metric; metrics in ``LOGARITHMIC`` have a logarithmic axis."""
    ax.set_ylabel(as_label(metric.replace("_", " ")))
    # Models that have diverged have no finite value to draw.
    if metric in LOGARITHMIC and any(
        (np.asarray(line.get_ydata(), float) > 0).any() for line in ax.lines
    ):
        ax.set_yscale("log")


def _whole_numbers(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def shared_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Draw one legend for all panels, below the figure."""
    entries: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    place: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, 0)}
    figure.legend(entries.values(), entries, ncols=min(4, len(entries)), frameon=False, **place)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG file, which is replaced at once; return its path."""
    figure.tight_layout()
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", bbox_inches="tight", facecolor="white")
    return path
