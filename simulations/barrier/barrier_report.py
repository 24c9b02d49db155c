"""Summaries, tables and plots of loss barriers, each compared with the line of method vanilla."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedrot.simulations.barrier.barrier_lines import BarrierLine, ordered
from fedrot.simulations.barrier.barrier_methods import VANILLA
from fedrot.simulations.report.plots import PALETTE, name_metric, new_figure, save_figure, shared_legend
from fedrot.simulations.report.summaries import Paired, paired_difference
from fedrot.simulations.report.tables import Table, format_interval, pipe_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS = "loss"
#: Largest number of panels in a row of a plot, and largest width in inches (1,600 pixels).
MOST_ACROSS, WIDTH = 6, 13.2


@dataclass(frozen=True)
class BarrierSummary:
    """The lines of one method in one cell: means over pairs with 95 % t intervals.

    Attributes:
        above: the largest loss minus the loss of the worse end.
        share: the barrier divided by that of the vanilla line of the same pair; NaN without that line.
        headline: the name of the task's first metric.
        middle, ends: values of this metric in the middle and at both ends.
        distance: squared distance after matching divided by that before.
    """

    cell: str
    method: str
    pairs: int
    barrier: Paired
    above: Paired
    share: Paired
    headline: str
    middle: Paired
    ends: tuple[Paired, Paired]
    distance: Paired
    seconds: Paired


def headline_of(lines: Sequence[BarrierLine]) -> str:
    """Return the first metric of a cell's lines."""
    return next(iter(lines[0].barrier.rows[0]))


def by_cell(lines: Sequence[BarrierLine]) -> dict[str, dict[str, dict[str, BarrierLine]]]:
    """Return cell -> method -> pair -> line; cells in given order, methods in the order of METHODS."""
    found: dict[str, dict[str, dict[str, BarrierLine]]] = {line.cell: {} for line in lines}
    for line in ordered(lines):
        found[line.cell].setdefault(line.method, {})[line.pair] = line
    return found


def summarise(lines: Sequence[BarrierLine]) -> list[BarrierSummary]:
    """Summarise every method of every cell."""
    return [
        _summary(list(pairs.values()), methods.get(VANILLA, {}))
        for methods in by_cell(lines).values()
        for pairs in methods.values()
    ]


def _summary(lines: Sequence[BarrierLine], vanilla: Mapping[str, BarrierLine]) -> BarrierSummary:
    headline = headline_of(lines)

    def over(value: Callable[[BarrierLine], float]) -> Paired:
        return paired_difference([value(line) for line in lines])

    def headline_at(position: float) -> Paired:
        return over(lambda line: line.barrier.at(position)[headline])

    def share(line: BarrierLine) -> float:
        other = vanilla.get(line.pair)
        return _ratio(line.barrier.barrier, other.barrier.barrier if other else math.nan)

    return BarrierSummary(
        cell=lines[0].cell,
        method=lines[0].method,
        pairs=len(lines),
        barrier=over(lambda line: line.barrier.barrier),
        above=over(lambda line: line.barrier.above_ends),
        share=over(share),
        headline=headline,
        middle=headline_at(0.5),
        ends=(headline_at(0), headline_at(1)),
        distance=over(lambda line: _ratio(line.after, line.before)),
        seconds=over(lambda line: line.seconds),
    )


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan


#: Columns of the tables: titles, and functions from a summary to a cell's text. On the terminal, the
#: name of the headline metric replaces the word "headline".
_NAMES: dict[str, Callable[[BarrierSummary], str]] = {
    "cell": lambda s: s.cell,
    "headline": lambda s: s.headline.replace("_", " "),
    "pairs": lambda s: str(s.pairs),
}
_VALUES: dict[str, Callable[[BarrierSummary], str]] = {
    "method": lambda s: s.method,
    "barrier": lambda s: _shown(s.barrier),
    "above the worse end": lambda s: _shown(s.above, interval=False),
    "share of vanilla": lambda s: _shown(s.share),
    "headline at the middle": lambda s: _shown(s.middle),
    "at the ends": lambda s: ", ".join(_shown(end, interval=False) for end in s.ends),
    "distance left": lambda s: _shown(s.distance, interval=False),
    "seconds": lambda s: _shown(s.seconds, interval=False),
}

#: Columns that do not fit into a terminal.
_MARKDOWN_ONLY = ("above the worse end", "distance left", "seconds")


def _shown(value: Paired, interval: bool = True) -> str:
    return format_interval(value, interval=interval) if math.isfinite(value.mean) else "-"


def markdown(summaries: Sequence[BarrierSummary]) -> str:
    """Return the summaries as a Markdown table."""
    columns = {**_NAMES, **_VALUES}
    rows = [[read(summary) for read in columns.values()] for summary in summaries]
    return pipe_table([*columns], rows, ("cell", "headline", "method"))


def tables(summaries: Sequence[BarrierSummary]) -> list[Table]:
    """Return one table per cell, for the terminal."""
    found = []
    columns = {title: read for title, read in _VALUES.items() if title not in _MARKDOWN_ONLY}
    for cell in dict.fromkeys(summary.cell for summary in summaries):
        own = [summary for summary in summaries if summary.cell == cell]
        pairs, headline = max(summary.pairs for summary in own), _NAMES["headline"](own[0])
        table = Table(
            f"{cell}: loss barrier and {headline}, {pairs} pair(s)",
            [title.replace("headline", headline) for title in columns],
            [[read(summary) for read in columns.values()] for summary in own],
            texts=("method", "at the ends"),
            caption="Means over pairs, 95 % t intervals." if pairs > 1 else "",
        )
        found.append(table)
    return found


def plot(path: Path, lines: Sequence[BarrierLine]) -> Path:
    """Draw the loss and the headline metric of one cell: a panel per method, with the vanilla line.

    Thin lines are pairs, thick lines their means. All panels of a metric have the same axis.
    """
    (methods,) = by_cell(lines).values()
    shown = [name for name in methods if name != VANILLA] or [VANILLA]
    metrics = list(dict.fromkeys((LOSS, headline_of(lines))))
    bands = math.ceil(len(shown) / MOST_ACROSS)
    across = math.ceil(len(shown) / bands)
    width = min(WIDTH, 1 + 2.6 * max(2, across))
    figure, axes = new_figure(bands * len(metrics), across, width=width, height=2.2)
    for row, panels in enumerate(axes):
        band, metric = shown[row // len(metrics) * across :][:across], metrics[row % len(metrics)]
        first = axes[row % len(metrics)][0]
        for column, ax in enumerate(panels):
            if ax is not first:
                ax.sharey(first)
            if column >= len(band):
                ax.set_axis_off()
                continue
            name = band[column]
            _draw(ax, methods.get(VANILLA, {}).values(), metric, "0.45", VANILLA)
            if name != VANILLA:
                _draw(ax, methods[name].values(), metric, PALETTE[0], "method of the panel")
            if metric is metrics[0]:
                ax.set_title(name, loc="left", fontsize="small")
            ax.tick_params(labelsize="small", labelleft=not column, labelbottom=metric is metrics[-1])
            ax.set_xticks([0, 0.5, 1], ["0", "½", "1"])
        name_metric(panels[0], metric)
    figure.supxlabel("position on the line", fontsize="medium")
    shared_legend(figure, axes.flat)
    return save_figure(figure, path)


def _draw(ax: Axes, lines: Collection[BarrierLine], metric: str, colour: str, name: str) -> None:
    curves = [[row[metric] for row in line.barrier.rows] for line in lines]
    positions = [line.barrier.positions for line in lines]
    for where, curve in zip(positions, curves, strict=True):
        ax.plot(where, curve, color=colour, lw=0.7, alpha=0.4)
    if curves:
        ax.plot(positions[0], np.mean(curves, axis=0), color=colour, lw=1.8, label=name)
