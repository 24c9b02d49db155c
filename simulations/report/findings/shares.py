"""Shares of the squared distance that alignment found, and that chance removes: sums and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fedrot.report import shares_by
from fedrot.simulations.report.summaries import Row, by_setting
from fedrot.simulations.report.tables import Table

if TYPE_CHECKING:
    from pandas import DataFrame

HEADER = ("arm, part, rounds", "found", "chance", "found / chance", "groups moved")
CAPTION = "Shares of the squared distance that the best elements remove, and that chance removes."


def shares(rows: Iterable[Row], names: Sequence[str]) -> DataFrame:
    """Return the shares of the squared distance that alignment found, grouped by the columns ``names``.

    Distances are summed over rows before they are divided. Rows of dropped replies are left out.

    Returns:
        The columns ``names``; ``found``, the share that the best elements remove, applied or not (for
        rows of coupled parts, whose share of chance is unknown, the share that was removed);
        ``chance``, the share that chance removes, NaN if unknown; their ``ratio``, 0 if both are 0; and
        the numbers of ``moved`` groups and of all ``groups``.
    """
    import pandas

    found = shares_by(rows, lambda row: tuple(row.get(name, "") for name in names))
    chances = (share.chance_share for share in found.values())
    lines = [
        (
            *key,
            share.share,
            math.nan if chance is None else chance,
            share.ratio,
            share.moved,
            share.groups,
        )
        for (key, share), chance in zip(found.items(), chances, strict=True)
    ]
    return pandas.DataFrame(lines, columns=[*names, "found", "chance", "ratio", "moved", "groups"])


def cells(share: Any) -> list[str]:
    """Return ``12.7 %``, ``6.1 %``, ``2.1`` and ``12 of 16``; ``-`` for unknown values and 0 / 0."""
    chance = "-" if math.isnan(share.chance) else f"{100 * share.chance:.1f} %"
    known = math.isfinite(share.ratio) and (share.found or share.chance)
    ratio = f"{share.ratio:.1f}" if known else "-"
    return [f"{100 * share.found:.1f} %", chance, ratio, f"{share.moved} of {share.groups}"]


def share_tables(rows: Iterable[Row]) -> list[Table]:
    """Return the shares of every part in the first, in the last and in all rounds, and of chance.

    There is a table per setting and start. There is none if all rows lack the share of chance.
    """
    aligned = [row for row in rows if "before" in row]
    if all(row.get("chance") is None or math.isnan(row["chance"]) for row in aligned):
        return []
    found = []
    for setting, own in by_setting(aligned).items():
        rounds = {int(row["round"]) for row in own}
        for start in dict.fromkeys(row.get("start", "") for row in own):
            of_start = [row for row in own if row.get("start", "") == start]
            named = ", ".join(filter(None, [setting, start and f"start {start}"]))
            title = "What alignment found" + (f": {named}" if named else "")
            lines = _lines(of_start, min(rounds), max(rounds))
            found.append(Table(title, HEADER, lines, texts=HEADER[:1], caption=CAPTION))
    return found


def _lines(rows: Sequence[Row], first: int, last: int) -> list[list[str]]:
    """Return the lines of a table, ordered by arm and part, then by rounds."""
    spans = {f"round {first}": (first, first), f"round {last}": (last, last)}
    if first != last:
        spans[f"rounds {first} to {last}"] = (first, last)
    found: dict[tuple[str, str], list[list[str]]] = {}
    for span, (low, high) in spans.items():
        within = [row for row in rows if low <= row["round"] <= high]
        for share in shares(within, ["arm", "part"]).itertuples():
            name = ", ".join(filter(None, [share.arm, share.part, span]))
            found.setdefault((share.arm, share.part), []).append([name, *cells(share)])
    return [line for lines in found.values() for line in lines]
