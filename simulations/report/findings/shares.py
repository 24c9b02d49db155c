"""Shares of the squared distance that alignment found, beside chance: sums over rows, and tables."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from fedrot.simulations.report.summaries import Row, setting_of
from fedrot.simulations.report.tables import pipe_table, terminal_table

if TYPE_CHECKING:
    from rich.table import Table

Key = TypeVar("Key", bound=Hashable)

#: Headers of the cells of ``Share.cells``.
CELLS = ("found", "chance", "found / chance", "groups moved")


@dataclass(frozen=True)
class Share:
    """What alignment found in some rows, as a share of their squared distance to the anchor.

    Attributes:
        found: the share that best elements remove, moved or not; what was removed if ``chance`` is None.
        chance: the share that chance removes; None if a row does not say (older rows, parts that depend
            on each other).
        moved, groups: the number of groups that were moved, and of all.
    """

    found: float
    chance: float | None = None
    moved: int = 0
    groups: int = 0

    @property
    def ratio(self) -> float:
        """``found / chance``: 0 if both are 0, NaN if chance is not known."""
        if self.chance is None:
            return math.nan
        if self.chance == 0:
            return math.inf if self.found > 0 else 0.0
        return self.found / self.chance

    @property
    def known(self) -> tuple[float, ...]:
        """The share found, and that of chance if it is known."""
        return (self.found,) if self.chance is None else (self.found, self.chance)

    def cells(self) -> list[str]:
        """Return ``12.7 %``, ``6.1 %``, ``2.1`` and ``12 of 16``; ``-`` for what is not known."""
        chance = "-" if self.chance is None else f"{100 * self.chance:.1f} %"
        ratio = f"{self.ratio:.1f}" if math.isfinite(self.ratio) else "-"
        return [f"{100 * self.found:.1f} %", chance, ratio, f"{self.moved} of {self.groups}"]


def shares_by(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, Share]:
    """Return what alignment found, by key.

    Distances are summed over the rows with the same key before they are divided. Rows of dropped
    replies do not count.
    """
    # Squared distances (before alignment, removed, found, of chance; NaN if a row lacks one), and counts
    # of groups (moved, all).
    sums: dict[Key, np.ndarray] = defaultdict(lambda: np.zeros(6))
    for row in rows:
        if "before" in row:
            own, before = key(row), float(row["before"])
            removed, moved = before - float(row["after"]), row.get("moved", 0) > 0
            sums[own] += (before, removed, _given(row, "found"), _given(row, "chance"), moved, 1)
    return {own: _share(distances) for own, distances in sums.items()}


def _given(row: Row, name: str) -> float:
    value = row.get(name)
    return math.nan if value is None else float(value)


def _share(sums: np.ndarray) -> Share:
    before, removed, found, chance, moved, groups = sums.tolist()
    scale = 1 / before if before > 0 else 0.0
    if math.isnan(found + chance):
        return Share(scale * removed, None, int(moved), int(groups))
    return Share(scale * found, scale * chance, int(moved), int(groups))


class Layer(NamedTuple):
    """A part of the model in one layer, in one arm of a run."""

    setting: str
    start: str
    arm: str
    part: str
    layer: int


def shares_by_layer(rows: Iterable[Row]) -> dict[Layer, Share]:
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
    if all(math.isnan(_given(row, "chance")) for row in aligned):
        return None
    names = [name for name in ("setting", "start", "arm") if len({row.get(name) for row in aligned}) > 1]
    spans = _spans(aligned)

    def key(row: Row) -> tuple[Any, ...]:
        return (*(str(row.get(name, "")) for name in names), str(row["part"]))

    found = {span: shares_by(within, key) for span, within in spans.items()}
    lines = []
    for own in dict.fromkeys(map(key, aligned)):
        lines += [[*own, span, *shares[own].cells()] for span, shares in found.items() if own in shares]
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
