"""The heat map of alignment: shares found, compared with chance, by part, layer and round."""

from __future__ import annotations

from collections.abc import Iterable

from fedrot.report import Shares, shares_by
from fedrot.simulations.report.page import Cell, Grid
from fedrot.simulations.summary import Row
from fedrot.symmetry import NO_LAYER

CAPTION = (
    "Numbers and colours: share (%) of the squared distance between clients that the best rotations and "
    "orders of weights remove, over clients and seeds. Grey: no more than they remove from noise alone "
    "(chance), or less than 0.5 %. Orange: this part's distance grew, that of others shrank."
)
#: Shares with a smaller absolute value are shown as 0; the colour of larger ones than ``MOST`` is full.
NOTHING, MOST = 0.005, 0.5


def heat_maps(rows: Iterable[Row]) -> list[Grid]:
    """Return the shares of the squared distance found, a grid per strategy.

    A grid has a line per part and layer, and a column per round. Distances are summed over clients,
    seeds and groups before they are divided. The rows have ``round``, ``part``, ``layer``, ``before``,
    ``after``, ``moved``, ``found`` and perhaps ``strategy`` and ``chance``.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.get("strategy", "")), []).append(row)
    return [_heat_map(name, own) for name, own in found.items()]


def _heat_map(strategy: str, rows: Iterable[Row]) -> Grid:
    cells = shares_by(rows, lambda row: (str(row["part"]), int(row["layer"]), int(row["round"])))
    parts = [*dict.fromkeys(part for part, _, _ in cells)]
    rounds = sorted({number for _, _, number in cells})
    lines = {
        part if layer == NO_LAYER else f"{part}, layer {layer}": [
            _cell(cells.get((part, layer, number))) for number in rounds
        ]
        for part, layer in sorted({key[:2] for key in cells}, key=lambda k: (parts.index(k[0]), k[1]))
    }
    return Grid(strategy, "round", [*map(str, rounds)], lines)


def _cell(shares: Shares | None) -> Cell:
    if shares is None:
        return Cell("")
    share = shares.share if abs(shares.share) >= NOTHING else 0.0
    chance = not share or (shares.chance is not None and shares.ratio <= 1)
    kind = "chance" if chance else "grew" if share < 0 else "found"
    return Cell(f"{100 * share:.0f}", min(abs(share) / MOST, 1.0), kind)
