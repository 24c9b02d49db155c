"""The heat map of alignment: shares found, compared with chance, by part, layer and round."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from fedrot.report import shares_by
from fedrot.simulations.report import plots
from fedrot.simulations.report.page import Picture
from fedrot.simulations.summary import Row
from fedrot.symmetry import NO_LAYER

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CAPTION = (
    "Numbers and colours: share (%) of the squared distance between clients that the best rotations and "
    "orders of weights remove, over clients and seeds. Grey: no more than they remove from noise alone "
    "(chance), or less than 0.5 %. Orange: this part's distance grew, that of others shrank."
)
#: Shares with a smaller absolute value are shown as 0.
NOTHING = 0.5


def alignment_pictures(rows: Iterable[Row]) -> list[Picture]:
    """Return a heat map per strategy of rows of alignment."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get("strategy", "")), []).append(row)
    alt = "Shares of the distance that alignment found, by part, layer and round"
    return [Picture(plots.data_uri(heat_map(own)), f"{alt} {name}", name) for name, own in found.items()]


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
    columns = sorted({number for _, _, number in cells})
    shares, beyond = np.full((2, len(lines), len(columns)), math.nan)
    for (part, layer, number), own in cells.items():
        place = lines.index((part, layer)), columns.index(number)
        shares[place] = 100 * own.share if 100 * abs(own.share) >= NOTHING else 0.0
        chance = own.chance is not None and own.ratio <= 1
        beyond[place] = math.nan if chance or not shares[place] else shares[place]
    width = min(plots.NARROW, 2.6 + 0.42 * len(columns))
    figure, (ax,) = plots.new_figure(width=width, height=min(0.25 * len(lines), 10) + 0.8)
    purple = LinearSegmentedColormap.from_list("share", ("#E6E2F0", "#6A51A3", "#3F007D"))
    colours = purple.with_extremes(bad="0.85", under="#D55E00")
    image = ax.imshow(beyond, colours, aspect="auto", interpolation="nearest", vmin=0, vmax=50)
    drawn = image.to_rgba(np.ma.masked_invalid(beyond))
    # Cells without a row are white.
    ax.imshow(np.where(np.isnan(shares), 1.0, math.nan), "binary_r", aspect="auto", vmin=0, vmax=1)
    if shares.size <= plots.MOST_NUMBERS:
        plots.write_numbers(ax, shares, drawn)
    bar = figure.colorbar(image, ax=ax, extend="both", label="share (%)", pad=0.03)
    bar.outline.set_visible(False)
    names = [part if layer == NO_LAYER else f"{part}, layer {layer}" for part, layer in lines]
    plots.name_cells(ax, names, list(map(str, columns)), "round")
    return figure
