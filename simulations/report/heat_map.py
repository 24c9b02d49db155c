"""The heat map of alignment: shares found, compared with chance, by part, layer and round."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedrot.report import Shares, shares_by
from fedrot.simulations.report.plots import (
    MOST_NUMBERS,
    NARROW,
    as_label,
    new_figure,
    plain_grid,
    write_numbers,
)
from fedrot.simulations.summary import Row
from fedrot.symmetry import NO_LAYER

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Scale(NamedTuple):
    """Colours of cells, the same in every picture: from ``low`` to ``high``, and ``under`` below."""

    colours: tuple[str, ...]
    low: float
    high: float
    under: str
    ticks: dict[float, str]
    name: str


#: Scale of cells for which the share of chance is known.
RATIO = Scale(
    ("#00224e", "#7d7c78", "#fee838"), 1, 4, "0.82", {1: "1", 2: "2", 3: "3", 4: "4"}, "found / chance"
)
#: Scale of other cells.
SHARE = Scale(
    ("#E6E2F0", "#6A51A3", "#3F007D"),
    0,
    0.5,
    "#D55E00",
    {0: "0 %", 0.25: "25 %", 0.5: "50 %"},
    "removed",
)
CAPTION = (
    "Numbers: share (%) of the squared distance between a client's weights and the others' that the best "
    "rotations and orders remove, over clients and seeds. Colours: this share divided by what they remove "
    "from noise (chance), from 1 to 4 and more; grey: no more than chance, or less than 0.5 %."
)
UNKNOWN = (
    " Purple: chance is not known; colours are the share removed, from 0 to 50 %. Orange: the distance of "
    "this part grew, that of others shrank."
)
#: Shares with a smaller absolute value are shown as 0.
NOTHING = 0.005
#: Largest height of the cells in inches, and largest number of labels of columns.
TALLEST, MOST_LABELS = 11.0, 16


def caption(rows: Iterable[Row]) -> str:
    """Return the caption of the picture of these rows."""
    return CAPTION + (UNKNOWN if any(s.chance is None for s in _cells(rows).values()) else "")


def heat_map(rows: Iterable[Row]) -> Figure:
    """Draw the share of the squared distance found: a line per part and layer, a column per round.

    Distances are summed over clients, seeds and groups before they are divided. The rows are of one
    strategy, with ``round``, ``part``, ``layer``, ``before``, ``after``, ``moved``, ``found`` and
    optionally ``chance``.
    """
    cells = _cells(rows)
    parts = list(dict.fromkeys(part for part, _, _ in cells))
    lines = sorted({key[:2] for key in cells}, key=lambda line: (parts.index(line[0]), line[1]))
    columns = sorted({number for _, _, number in cells})
    found, ratio, share = np.full((3, len(lines), len(columns)), math.nan)
    for (part, layer, number), own in cells.items():
        place = lines.index((part, layer)), columns.index(number)
        found[place] = own.share
        if own.chance is None:
            share[place] = own.share if abs(own.share) >= NOTHING else 0.0
        else:
            ratio[place] = min(own.ratio, RATIO.high) if own.share >= NOTHING else 0.0
    tall = min(0.25 * len(lines), TALLEST)
    width = min(NARROW, 2.6 + 0.42 * len(columns))
    figure, (ax,) = new_figure(width=width, height=tall + 0.7)
    for scale, values in ((RATIO, ratio), (SHARE, share)):
        if not np.isnan(values).all():
            _draw(ax, scale, values, found)
    every = math.ceil(len(lines) / (TALLEST / 0.16))
    labels = [part if layer == NO_LAYER else f"{part} {layer}" for part, layer in lines[::every]]
    ax.set_yticks(range(0, len(lines), every), list(map(as_label, labels)))
    every = math.ceil(len(columns) / MOST_LABELS)
    ax.set_xticks(range(0, len(columns), every), list(map(str, columns[::every])))
    ax.set_xlabel("round")
    plain_grid(ax)
    return figure


def _cells(rows: Iterable[Row]) -> dict[tuple[str, int, int], Shares]:
    return shares_by(rows, lambda row: (str(row["part"]), int(row["layer"]), int(row["round"])))


def _draw(ax: Any, scale: Scale, values: np.ndarray, found: np.ndarray) -> None:
    """Draw the cells of a scale with its bar, and the shares found as numbers."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list(scale.name, scale.colours)
    colours = colours.with_extremes(bad=(1, 1, 1, 0), under=scale.under)
    limits: dict[str, Any] = {"vmin": scale.low, "vmax": scale.high}
    image = ax.imshow(values, colours, aspect="auto", interpolation="nearest", **limits)
    if values.size <= MOST_NUMBERS:
        numbers = np.where(np.isnan(values), math.nan, 100 * found)
        write_numbers(ax, numbers, image.to_rgba(np.ma.masked_invalid(values)))
    bar = ax.figure.colorbar(image, ax=ax, extend="both", ticks=[*scale.ticks], shrink=0.9, pad=0.03)
    bar.ax.set_yticklabels([*scale.ticks.values()])
    bar.set_label(scale.name)
    bar.outline.set_visible(False)
