"""The heat map of an alignment report: the gain by part, layer and round."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrot.simulations.report.plots import new_figure, save_figure
from fedrot.simulations.report.summaries import Row, removed_by

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

CAPTION = (
    "Share (%) of the squared distance to the anchor that alignment removed, over clients and seeds. "
    "The colours go from 0 to the largest share of the picture; orange: a part that moved away, for the "
    "good of others; grey: nothing to measure."
)
#: Inches of a cell, of a panel at most, of the picture's width, of titles and labels.
CELL_WIDTH, CELL_HEIGHT, PANEL_WIDTH, PANEL_HEIGHT, WIDTH, AROUND = 0.42, 0.25, 5.2, 14.0, 12.8, 1.1
#: Panels with more cells than this have no numbers.
MOST_NUMBERS = 150
#: Shares below this are no gain, and above minus this no loss.
NOTHING = 0.005


def alignment_plot(path: Path, rows: Iterable[Row]) -> Path:
    """Draw the share of the squared distance removed: a row per part and layer, a column per round.

    There is one panel per arm and start; with a single round, one per start with a column per arm.
    Distances are summed over clients, seeds and groups before they are divided. The colours, for
    colour-blind readers too, go from 0 to the largest share of the picture (at least 1 %).
    The rows of one setting have ``round``, ``part``, ``layer``, ``before``, ``after``, and perhaps
    ``arm`` and ``start``.
    """
    rows = list(rows)
    rounds = sorted({int(row["round"]) for row in rows})
    several = len(rounds) > 1

    def column_of(row: Row) -> Any:
        return int(row["round"]) if several else str(row.get("arm", f"round {row['round']}"))

    panels: dict[str, list[Row]] = {}
    for row in rows:
        arm = str(row.get("arm", "")) if several else ""
        start = f"start: {row['start']}" if "start" in row else ""
        panels.setdefault(", ".join(filter(None, (arm, start))), []).append(row)
    lines = _lines(rows)
    columns: list[Any] = rounds if several else list(dict.fromkeys(map(column_of, rows)))
    tables = {title: _table(own, lines, columns, column_of) for title, own in panels.items()}
    largest = max((float(np.nanmax(t)) for t in tables.values() if not np.isnan(t).all()), default=0.0)

    width = min(max(CELL_WIDTH * len(columns), 1.6), PANEL_WIDTH)
    height = min(CELL_HEIGHT * len(lines), PANEL_HEIGHT)
    # Names of arms are longer than numbers of rounds.
    below = 0.0 if several else 0.06 * max(map(len, columns))
    across = max(1, min(len(tables), int(WIDTH // (width + AROUND))))
    down = math.ceil(len(tables) / across)
    figure, axes = new_figure(
        down, across, width=across * (width + AROUND), height=height + AROUND + below, sharey=True
    )
    for ax in axes.flat[len(tables) :]:
        ax.set_axis_off()
    for ax, (title, table) in zip(axes.flat, tables.items(), strict=False):
        image = _panel(ax, table, max(largest, 0.01))
        ax.set_title(title, loc="left", fontsize="medium")
        _label(ax, lines, columns, "round" if several else "")
    place = axes[0][-1].inset_axes([1 + 0.15 / width, 0, 0.15 / width, 1])
    bar = figure.colorbar(image, cax=place, format=lambda share, _: f"{100 * share:.0f} %")
    bar.ax.tick_params(labelsize="small")
    bar.outline.set_visible(False)
    return save_figure(figure, path)


def _lines(rows: Iterable[Row]) -> list[tuple[str, int]]:
    """Return the picture's lines, by part and then by layer; -1 is the whole model."""
    found = dict.fromkeys((str(row["part"]), int(row["layer"])) for row in rows)
    parts = list(dict.fromkeys(part for part, _ in found))
    return sorted(found, key=lambda line: (parts.index(line[0]), line[1]))


def _table(
    rows: Iterable[Row], lines: list[tuple[str, int]], columns: list[Any], column_of: Any
) -> np.ndarray:
    shares = removed_by(rows, lambda row: (str(row["part"]), int(row["layer"]), column_of(row)))
    table = [[shares.get((*line, column), math.nan) for column in columns] for line in lines]
    return np.array(table)


def _panel(ax: Axes, table: np.ndarray, largest: float) -> AxesImage:
    import matplotlib

    colours = matplotlib.colormaps["cividis"].with_extremes(bad="0.85", under="#D55E00")
    shown = np.where(np.abs(table) < NOTHING, np.abs(table), table)
    image = ax.imshow(shown, colours, aspect="auto", interpolation="nearest", vmin=0, vmax=largest)
    if table.size <= MOST_NUMBERS:
        for (line, column), share in np.ndenumerate(shown):
            if not math.isnan(share):
                colour = "black" if share > 0.55 * largest else "white"
                number = f"{100 * share:.0f}"
                ax.text(column, line, number, ha="center", va="center", color=colour, fontsize=7)
    return image


def _label(ax: Axes, lines: list[tuple[str, int]], columns: list[Any], name: str) -> None:
    every = math.ceil(len(lines) / (PANEL_HEIGHT / 0.16))
    places = range(0, len(lines), every)
    labels = [part if layer < 0 else f"{part} {layer}" for part, layer in lines[::every]]
    ax.set_yticks(places, labels, fontsize="small")
    parts = [part for part, _ in lines]
    for place in range(1, len(lines)):
        if parts[place] != parts[place - 1]:
            ax.axhline(place - 0.5, color="white", lw=2)
    every = math.ceil(len(columns) / 20)
    slanted: dict[str, Any] = {} if name else {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(range(0, len(columns), every), columns[::every], fontsize="small", **slanted)
    ax.set_xlabel(name)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
