"""Tables of the share of the squared distance that alignment found, beside chance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fedrot.report import Shares, shares_by
from fedrot.simulations.report.summaries import Row, setting_of
from fedrot.simulations.report.tables import pipe_table, terminal_table

if TYPE_CHECKING:
    from rich.table import Table

#: Headers of the cells of ``cells``.
CELLS = ("found", "chance", "found / chance", "groups moved")


def cells(shares: Shares) -> list[str]:
    """Return ``12.7 %``, ``6.1 %``, ``2.1`` and ``12 of 16``; ``-`` for what is not known."""
    known, ratio = shares.chance_share, shares.ratio
    chance = "-" if known is None else f"{100 * known:.1f} %"
    times = f"{ratio:.1f}" if math.isfinite(ratio) else "-"
    return [f"{100 * shares.share:.1f} %", chance, times, f"{shares.moved} of {shares.groups}"]


class Layer(NamedTuple):
    """A part of the model in one layer, in one arm of a run."""

    setting: str
    start: str
    arm: str
    part: str
    layer: int


def shares_by_layer(rows: Iterable[Row]) -> dict[Layer, Shares]:
    """Return what alignment found by setting, start, arm, part and layer, layers ascending."""

    def key(row: Row) -> Layer:
        names = (str(row["start"]), str(row["arm"]), str(row["part"]), int(row["layer"]))
        return Layer(setting_of(row), *names)

    return dict(sorted(shares_by(rows, key).items(), key=lambda item: item[0].layer))


@dataclass(frozen=True)
class ShareTable:
    """A table of shares: the names of its columns, and its lines as text."""

    names: tuple[str, ...]
    lines: list[list[str]]

    @property
    def header(self) -> list[str]:
        """The headers of all columns."""
        return [*self.names, *CELLS]

    def markdown(self) -> str:
        """Return the table as Markdown."""
        return pipe_table(self.header, self.lines, self.names)

    def terminal(self) -> Table:
        """Return the table for the terminal."""
        from rich.text import Text

        caption = "Share of the squared distance that the best elements remove, and that chance does."
        title = "What alignment found"
        table = terminal_table(title, self.header, texts=self.names, caption=caption, fold=True)
        for line in self.lines:
            table.add_row(*map(Text, line))
        return table


def share_table(rows: Sequence[Row]) -> ShareTable | None:
    """Return what every part found in the first and the last round and in all, beside chance.

    Columns that have one value only (setting, start, arm) are left out. None if no row knows what chance
    removes.
    """
    aligned = [row for row in rows if "before" in row]
    if all(Shares.of(row).chance is None for row in aligned):
        return None
    names = [name for name in ("setting", "start", "arm") if len({row.get(name) for row in aligned}) > 1]
    spans = _spans(aligned)

    def key(row: Row) -> tuple[Any, ...]:
        return (*(str(row.get(name, "")) for name in names), str(row["part"]))

    found = {span: shares_by(within, key) for span, within in spans.items()}
    lines = []
    for own in dict.fromkeys(map(key, aligned)):
        lines += [[*own, span, *cells(shares[own])] for span, shares in found.items() if own in shares]
    return ShareTable((*names, "part", "rounds"), lines)


def _spans(aligned: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of every setting's first round, of its last one, and of all, by these in words."""
    rounds: dict[str, set[int]] = {}
    for row in aligned:
        rounds.setdefault(setting_of(row), set()).add(int(row["round"]))
    found: dict[str, list[Row]] = {}
    for row in aligned:
        number, own = int(row["round"]), rounds[setting_of(row)]
        first, last = min(own), max(own)
        ends = [f"{number}"] if number in (first, last) else []
        for span in ends + ([f"{first} to {last}"] if first != last else []):
            found.setdefault(span, []).append(row)
    return dict(sorted(found.items(), key=lambda item: [int(n) for n in item[0].split(" to ")][::-1]))
