"""The heat map of an alignment report: shares found, compared with chance, by part, layer and round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrot.simulations.report.findings.shares import shares
from fedrot.simulations.report.plots import as_label, new_figure, save_figure
from fedrot.simulations.report.summaries import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.image import AxesImage


@dataclass(frozen=True)
class Scale:
    """Colours of cells, the same in every picture.

    Attributes:
        colours: a colour map's name or its colours, from ``low`` to ``high``.
        under: colour of values below ``low``.
        ticks: labels of the colour bar, by value.
        name: title of the colour bar.
        caption: explanation of the colours.
    """

    colours: str | Sequence[str]
    low: float
    high: float
    under: str
    ticks: dict[float, str]
    name: str
    caption: str

    def colour_map(self) -> Colormap:
        """Return the colour map; cells without a value are transparent."""
        import matplotlib
        from matplotlib.colors import LinearSegmentedColormap

        if isinstance(self.colours, str):
            found = matplotlib.colormaps[self.colours]
        else:
            found = LinearSegmentedColormap.from_list(self.name, self.colours)
        return found.with_extremes(bad=(1, 1, 1, 0), under=self.under)


#: Scale of cells for which the share of chance is known.
RATIO = Scale(
    "cividis",
    *(1.0, 4.0, "0.82"),
    {1.0: "1", 2.0: "2", 3.0: "3", 4.0: "4"},
    "found / chance",
    "Colours: the share that the best elements remove (applied or not) divided by the share that chance "
    "removes, from 1 to 4 and more; grey: no more than chance, or less than 0.5 %.",
)
#: Scale of other cells.
SHARE = Scale(
    ("#E6E2F0", "#9E9AC8", "#6A51A3", "#3F007D"),
    *(0.0, 0.5, "#D55E00"),
    {0.0: "0 %", 0.25: "25 %", 0.5: "50 %"},
    "removed",
    "Purple: chance is unknown (parts that are matched together); the colours are the "
    "share removed, from 0 to 50 %; orange: the distance of this part grew, that of others shrank.",
)
SCALES = (RATIO, SHARE)
CAPTION = "Share (%) of the squared distance to the anchor that alignment found, over clients and seeds."

#: Sizes in inches: cell, largest panel, width of the picture, titles and labels, colour bar.
CELL_WIDTH, CELL_HEIGHT, PANEL_WIDTH, PANEL_HEIGHT, WIDTH, AROUND = 0.42, 0.25, 5.2, 14.0, 12.8, 1.1
BAR, NEXT_BAR, BAR_HEIGHT = 0.15, 0.85, 2.5
#: Panels with more cells than this have no numbers.
MOST_NUMBERS = 150
#: Shares with a smaller absolute value are shown as 0.
NOTHING = 0.005


@dataclass(frozen=True)
class Cells:
    """The cells of a panel, ``[lines, columns]``: share found, and ratio to chance; NaN if unknown."""

    found: np.ndarray
    ratio: np.ndarray

    def has(self, scale: Scale) -> bool:
        """Return whether a scale colours any of the cells."""
        return not np.isnan(self.values(scale)).all()

    def values(self, scale: Scale) -> np.ndarray:
        """Return the values that a scale colours; NaN in cells of the other scale."""
        if scale is RATIO:
            tiny = (self.found < NOTHING) & ~np.isnan(self.ratio)
            return np.where(tiny, 0.0, np.minimum(self.ratio, scale.high))
        unknown = np.where(np.isnan(self.ratio), self.found, math.nan)
        return np.where(np.abs(unknown) < NOTHING, np.abs(unknown), unknown)


def caption(rows: Iterable[Row]) -> str:
    """Return the caption of the picture of these rows, with the meaning of its colours."""

    cells = shares(rows, ["start", "arm", "round", "part", "layer"])
    known = set(cells["chance"].notna())
    scales = [scale for scale, used in ((RATIO, True in known), (SHARE, False in known)) if used]
    return " ".join([CAPTION, *(scale.caption for scale in scales)])


def alignment_plot(path: Path, rows: Iterable[Row]) -> Path:
    """Draw the share of the squared distance found: a row per part and layer, a column per round.

    There is one panel per arm and start; with a single round, one per start with a column per arm.
    Distances are summed over clients, seeds and groups before they are divided. Colours suit
    colour-blind readers and have the same meaning in every picture, see ``RATIO`` and ``SHARE``. The
    rows are of one setting, with ``round``, ``part``, ``layer``, ``before``, ``after``, and optionally
    ``found``, ``chance``, ``arm`` and ``start``.
    """
    rows = list(rows)
    rounds = sorted({int(row["round"]) for row in rows})
    several = len(rounds) > 1

    column = "round" if several else "arm"
    if not several:
        rows = [{"arm": f"round {row['round']}", **row} for row in rows]
    panels: dict[str, list[Row]] = {}
    for row in rows:
        arm = str(row.get("arm", "")) if several else ""
        start = f"start: {row['start']}" if "start" in row else ""
        panels.setdefault(", ".join(filter(None, (arm, start))), []).append(row)
    lines = _lines(rows)
    columns: list[Any] = rounds if several else list(dict.fromkeys(row[column] for row in rows))
    cells = {title: _cells(own, lines, columns, column) for title, own in panels.items()}

    width = min(max(CELL_WIDTH * len(columns), 1.6), PANEL_WIDTH)
    height = min(CELL_HEIGHT * len(lines), PANEL_HEIGHT)
    # Names of arms are longer than numbers of rounds.
    below = 0.0 if several else 0.06 * max(len(name) for name in columns)
    across = max(1, min(len(cells), int(WIDTH // (width + AROUND))))
    down = math.ceil(len(cells) / across)
    scales = [scale for scale in SCALES if any(own.has(scale) for own in cells.values())]
    figure, axes = new_figure(
        down,
        across,
        width=across * (width + AROUND) + (len(scales) - 1) * NEXT_BAR + BAR,
        height=height + AROUND + below,
        sharey=True,
    )
    for ax in axes.flat[len(cells) :]:
        ax.set_axis_off()
    images: dict[str, AxesImage] = {}
    for ax, (title, own) in zip(axes.flat, cells.items(), strict=False):
        images |= _panel(ax, own)
        ax.set_title(as_label(title), loc="left", fontsize="medium")
        _label(ax, lines, columns, "round" if several else "")
    for place, scale in enumerate(scales):
        left = 1 + (BAR + place * NEXT_BAR) / width
        tall = min(1.0, BAR_HEIGHT / height)
        where = axes[0][-1].inset_axes((left, 1 - tall, BAR / width, tall))
        _bar(where, images[scale.name], scale)
    return save_figure(figure, path)


def _lines(rows: Iterable[Row]) -> list[tuple[str, int]]:
    """Return the picture's lines (part, layer) in order; layer -1 is the whole model."""
    found = dict.fromkeys((str(row["part"]), int(row["layer"])) for row in rows)
    parts = list(dict.fromkeys(part for part, _ in found))
    return sorted(found, key=lambda line: (parts.index(line[0]), line[1]))


def _cells(rows: Iterable[Row], lines: list[tuple[str, int]], columns: list[Any], column: str) -> Cells:
    found = shares(rows, ["part", "layer", column]).set_index(["part", "layer", column])
    places = [(*line, own) for line in lines for own in columns]
    placed = found.reindex(places)[["found", "ratio"]].to_numpy(float)
    return Cells(*placed.T.reshape(2, len(lines), len(columns)))


def _panel(ax: Axes, cells: Cells) -> dict[str, AxesImage]:
    """Draw a panel; return the images by name of the scale."""
    images = {}
    for scale in filter(cells.has, SCALES):
        values = np.ma.masked_invalid(cells.values(scale))
        limits: dict[str, Any] = {"vmin": scale.low, "vmax": scale.high}
        image = ax.imshow(values, scale.colour_map(), aspect="auto", interpolation="nearest", **limits)
        images[scale.name] = image
        if values.size <= MOST_NUMBERS:
            _write_numbers(ax, np.ma.masked_array(cells.found, values.mask), image.to_rgba(values))
    return images


def _write_numbers(ax: Axes, shares: np.ma.MaskedArray, colours: np.ndarray) -> None:
    for (line, column), share in np.ndenumerate(shares):
        if not np.ma.is_masked(shares[line, column]):
            light = float(colours[line, column][:3] @ (0.299, 0.587, 0.114)) > 0.55
            number = f"{100 * share:.0f}".replace("-0", "0")
            colour = "black" if light else "white"
            ax.text(column, line, number, ha="center", va="center", color=colour, fontsize=7)


def _bar(where: Axes, image: AxesImage, scale: Scale) -> None:
    bar = where.figure.colorbar(image, cax=where, extend="both", extendfrac=0.1, ticks=[*scale.ticks])
    bar.ax.set_yticklabels([*scale.ticks.values()], fontsize="small")
    bar.ax.tick_params(length=0)
    bar.set_label(scale.name, fontsize="small")
    bar.outline.set_visible(False)


def _label(ax: Axes, lines: list[tuple[str, int]], columns: list[Any], name: str) -> None:
    every = math.ceil(len(lines) / (PANEL_HEIGHT / 0.16))
    places = range(0, len(lines), every)
    labels = [as_label(part if layer < 0 else f"{part} {layer}") for part, layer in lines[::every]]
    ax.set_yticks(places, labels, fontsize="small")
    parts = [part for part, _ in lines]
    for place in range(1, len(lines)):
        if parts[place] != parts[place - 1]:
            ax.axhline(place - 0.5, color="white", lw=2)
    every = math.ceil(len(columns) / 20)
    slanted: dict[str, Any] = {} if name else {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    ax.set_xticks(
        range(0, len(columns), every),
        [as_label(str(c)) for c in columns[::every]],
        fontsize="small",
        **slanted,
    )
    ax.set_xlabel(name)
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
