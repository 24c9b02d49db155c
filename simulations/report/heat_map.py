"""The heat map of alignment: shares found, compared with chance, by part, layer and round."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedrot.report import shares_by
from fedrot.simulations.report import plots
from fedrot.simulations.report.page import Picture
from fedrot.simulations.summary import Row
from fedrot.symmetry import NO_LAYER

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Scale(NamedTuple):
    """Colours of cells from ``low`` to ``high``, the same in every picture, and the colour below."""

    name: str
    colours: tuple[str, ...]
    low: float
    high: float
    under: str
    caption: str


#: Scale of cells for which the share of chance is known.
RATIO = Scale(
    "found / chance",
    *(("#00224e", "#7d7c78", "#fee838"), 1, 4, "0.82"),
    "Colours: this share divided by what they remove from noise alone (chance), from 1 to 4 and more; "
    "grey: no more than chance, or less than 0.5 %.",
)
#: Scale of other cells.
SHARE = Scale(
    "removed",
    *(("#E6E2F0", "#6A51A3", "#3F007D"), 0, 0.5, "#D55E00"),
    "Purple: chance is not known; the colours are the share removed, from 0 to 0.5; orange: the distance "
    "of this part grew, that of others shrank.",
)
CAPTION = (
    "Numbers: share (%) of the squared distance between clients that the best rotations and orders of "
    "weights remove, over clients and seeds."
)
#: Shares with a smaller absolute value are shown as 0.
NOTHING = 0.005


def alignment_pictures(rows: Iterable[Row]) -> list[Picture]:
    """Return a heat map per strategy of rows of alignment."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get("strategy", "")), []).append(row)
    alt = "Share of the distance that alignment found, by part, layer and round"
    return [
        Picture(plots.data_uri(figure), f"{alt} {name}", ": ".join(filter(None, [name, caption])))
        for name, own in found.items()
        for figure, caption in [heat_map(own)]
    ]


def heat_map(rows: Iterable[Row]) -> tuple[Figure, str]:
    """Draw the share of the squared distance found: a line per part and layer, a column per round.

    Distances are summed over clients, seeds and groups before they are divided. The rows are of one
    strategy, with ``round``, ``part``, ``layer``, ``before``, ``after``, ``moved``, ``found`` and
    optionally ``chance``. Returns the figure and its caption.
    """
    cells = shares_by(rows, lambda row: (str(row["part"]), int(row["layer"]), int(row["round"])))
    parts = list(dict.fromkeys(part for part, _, _ in cells))
    lines = sorted({key[:2] for key in cells}, key=lambda line: (parts.index(line[0]), line[1]))
    columns = sorted({number for _, _, number in cells})
    found, ratio, removed = np.full((3, len(lines), len(columns)), math.nan)
    for (part, layer, number), own in cells.items():
        place = lines.index((part, layer)), columns.index(number)
        found[place] = own.share if abs(own.share) >= NOTHING else 0.0
        if own.chance is None:
            removed[place] = found[place]
        else:
            ratio[place] = min(own.ratio, RATIO.high) if found[place] else 0.0
    width = min(plots.NARROW, 2.6 + 0.42 * len(columns))
    figure, (ax,) = plots.new_figure(width=width, height=min(0.25 * len(lines), 10) + 0.8)
    used = [(scale, own) for scale, own in ((RATIO, ratio), (SHARE, removed)) if not np.isnan(own).all()]
    for scale, values in used:
        _draw(ax, scale, values, found)
    names = [part if layer == NO_LAYER else f"{part}, layer {layer}" for part, layer in lines]
    plots.name_cells(ax, names, list(map(str, columns)), "round")
    return figure, " ".join([CAPTION, *(scale.caption for scale, _ in used)])


def _draw(ax: Any, scale: Scale, values: np.ndarray, found: np.ndarray) -> None:
    """Draw the cells of a scale with its bar, and the shares found as numbers."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list(scale.name, scale.colours)
    colours = colours.with_extremes(bad=(1, 1, 1, 0), under=scale.under)
    limits: dict[str, Any] = {"vmin": scale.low, "vmax": scale.high}
    image = ax.imshow(values, colours, aspect="auto", interpolation="nearest", **limits)
    if values.size <= plots.MOST_NUMBERS:
        numbers = np.where(np.isnan(values), math.nan, np.round(100 * found) + 0.0)
        plots.write_numbers(ax, numbers, image.to_rgba(np.ma.masked_invalid(values)))
    bar = ax.figure.colorbar(image, ax=ax, extend="both", label=scale.name, pad=0.03)
    bar.outline.set_visible(False)
