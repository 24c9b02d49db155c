"""Tables and grids of cells, and numbers and differences as text."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from fedrot.distances import shares_by
from fedrot.simulations.summary import Paired, Row, Verdict
from fedrot.symmetry import NO_LAYER

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

#: A column of names is at least as wide as its names, up to this number of characters.
WIDEST = 26
#: What stands where there is no number.
NONE = "-"
#: Shares found by alignment that are shown as 0, and those from which on the colour is
#: full.
NOTHING, FULL = 0.005, 0.5


@dataclass(frozen=True)
class Table:
    """A table. Rich prints it, and the Jinja template renders it as HTML.

    Columns in ``texts`` hold names: they are left-aligned and may be broken. Others are
    right-aligned.
    """

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    texts: Container[str] = ()

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        # As Text, brackets in names and intervals are not markup.
        table = RichTable(
            box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False
        )
        table.title, table.title_justify = (
            Text(self.title) if self.title else None,
            "left",
        )
        for name, *cells in zip(self.header, *self.lines, strict=True):
            widest = max(map(len, [*name.split(), *cells]))
            if name in self.texts:
                table.add_column(name, overflow="fold", min_width=min(widest, WIDEST))
            else:  # only its name is broken
                table.add_column(name, justify="right", width=widest)
        for line in self.lines:
            table.add_row(*map(Text, line))
        yield table


def results_table(found: Verdict, metrics: Sequence[str]) -> Table:
    """Return a line per strategy: metrics, difference from the reference, worst client,
    bytes.
    """
    headline, lines = found.judged[0], []
    for own in found.standings:
        known = own is not found.reference
        against = format_difference(own.against[headline]) if known else NONE
        means = (number(own.mean(metric)) for metric in metrics)
        lines.append(
            (own.name, *means, against, number(own.worst), number(own.traffic / 1e6))
        )
    against = f"{spoken(headline)} against {found.reference.name}"
    header = ("strategy", *map(spoken, metrics), against, "worst client", "MB")
    return _table(header, lines, header[:1])


def lost_table(rows: Iterable[Row]) -> Table | None:
    """Return lost replies by strategy (if the rows have one), client and reason, most
    frequent first.
    """
    found: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        for what in {"dropped", "failed"} & row.keys():
            key = (row.get("strategy", NONE), row["client"], what, row[what])
            found.setdefault(tuple(map(str, key)), []).append(row["round"])
    lines = [
        (
            *key[:-1],
            str(len(rounds)),
            " to ".join(map(str, sorted({min(rounds), max(rounds)}))),
            key[-1],
        )
        for key, rounds in sorted(found.items(), key=lambda item: -len(item[1]))
    ]
    header = ("strategy", "client", "what", "times", "rounds", "reason")
    return _table(header, lines, {*header} - {"times", "rounds"}) if lines else None


def _table(
    header: Sequence[str], lines: Iterable[Sequence[str]], texts: Container[str]
) -> Table:
    """Return a table without the columns that are unknown in all lines."""
    columns = [own for own in zip(header, *lines, strict=True) if {*own[1:]} != {NONE}]
    header, *lines = zip(*columns, strict=True)
    return Table("", header, lines, texts)


class TableCell(NamedTuple):
    """A cell of a grid: its text, the strength of its colour from 0 to 1, and its CSS
    class.
    """

    text: str
    strength: float
    kind: str = ""


#: The names of columns; and the names of lines with their cells, empty ones are None.
Grid: TypeAlias = tuple[Sequence[object], Mapping[str, Sequence[TableCell | None]]]


def clients_grid(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Grid:
    """Return the rows of each class (line) and client (column); ``counts`` is
    [clients][classes].
    """
    most, lines = max(1, *map(max, counts)), [*names]
    lines += ["no class" if names else "rows"] * (len(counts[0]) - len(names))
    cells = (
        [TableCell(str(n), n / most) for n in own] for own in zip(*counts, strict=True)
    )
    columns = [f"{client} ({sum(own)})" for client, own in enumerate(counts)]
    return columns, dict(zip(lines, cells, strict=True))


def heat_map(rows: Iterable[Row]) -> Grid:
    """Return the share of the squared distance found by part and layer (line) and round
    (column).

    Distances are summed over clients, seeds and groups before they are divided. A share
    of no more than chance is of the kind ``chance``, a negative one ``grew``. The rows
    are of one strategy, with ``round``, ``part``, ``layer``, ``before``, ``after``,
    ``moved``, ``found`` and perhaps ``chance``.
    """
    found, cells = (
        shares_by(rows, lambda r: (str(r["part"]), int(r["layer"]), int(r["round"]))),
        {},
    )
    for place, own in found.items():
        share = own.share if abs(own.share) >= NOTHING else 0.0
        chance = not share or (own.chance is not None and own.ratio <= 1)
        kind = "chance" if chance else "grew" if share < 0 else "found"
        cells[place] = TableCell(
            f"{100 * share:.0f}", min(abs(share) / FULL, 1.0), kind
        )
    parts, rounds = (
        [*dict.fromkeys(part for part, _, _ in found)],
        sorted({n for _, _, n in found}),
    )
    lines = sorted(
        {place[:2] for place in found}, key=lambda line: (parts.index(line[0]), line[1])
    )
    return rounds, {
        part if layer == NO_LAYER else f"{part}, layer {layer}": [
            cells.get((part, layer, number)) for number in rounds
        ]
        for part, layer in lines
    }


def format_difference(difference: Paired) -> str:
    """Return ``+0.095 [+0.061, +0.129]``, or the verdict if there is no number."""
    known = difference.verdict != "same" and not math.isnan(difference.mean)
    return format_interval(difference, "+") if known else difference.verdict


def format_interval(value: Paired, sign: Literal["", "+"] = "") -> str:
    """Return ``0.412 [0.301, 0.523]``, without an unknown interval."""
    ends = (
        number(value.mean + half, sign) for half in (-value.smallest, value.smallest)
    )
    interval = "" if math.isnan(value.smallest) else f" [{', '.join(ends)}]"
    return number(value.mean, sign) + interval


def number(value: float, sign: Literal["", "+"] = "") -> str:
    """Return a number with three decimals, or digits if it is small or large; a dash
    for NaN.
    """
    if math.isnan(value):
        return NONE
    value = round(value, 6) + 0.0  # never -0.000
    size = abs(value)
    style = (
        ".3f"
        if size == 0 or 0.001 <= size < 100
        else ".0f"
        if 100 <= size < 1e6
        else ".3g"
    )
    return f"{value:{sign}{style}}"


def spoken(metric: str) -> str:
    """Return a metric's name in a sentence: ``macro F1``."""
    return metric.replace("_", " ").replace("f1", "F1")
