"""Tables and grids of cells, and numbers and differences as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from operator import itemgetter
from typing import Literal, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult

from fedrot.distances import Shares, shares_by
from fedrot.simulations.comparison.paired import Paired
from fedrot.simulations.comparison.site_gains import FEW_ROWS, SiteGains
from fedrot.simulations.comparison.summary import Verdict, span
from fedrot.simulations.run_folder import Row
from fedrot.symmetry import NO_LAYER

#: A column of names is at least as wide as its names, up to this number of characters.
WIDEST = 26
#: What stands where there is no number.
NONE = "-"
NO_DIFFERENCE = "no difference"
#: Smaller shares found by alignment are shown as 0.
NOTHING = 0.005
#: Digits after the point, behind which a number is 0.
DIGITS = 6
#: Larger shares have the full colour.
FULL = 0.5


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
        self,
        console: Console,
        options: ConsoleOptions,
    ) -> RenderResult:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        # As Text, brackets in names and intervals are not markup.
        table = RichTable(
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
            show_edge=False,
            title=Text(self.title) if self.title else None,
            title_justify="left",
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


def results_table(verdict: Verdict, metrics: Sequence[str]) -> Table:
    """Return a line per strategy.

    It has metrics, the difference from the reference, and bytes.
    """
    headline = verdict.judged[0]
    lines = []
    for standing in verdict.standings:
        means = map(standing.mean, metrics)
        difference = NONE
        if standing is not verdict.reference:
            difference = format_difference(standing.against[headline])
        lines.append(
            (
                standing.name,
                *map(number, means),
                difference,
                number(standing.megabytes),
            )
        )
    header = (
        "strategy",
        *map(spoken, metrics),
        f"{spoken(headline)} against {verdict.reference.name}",
        "MB",
    )
    return _table(header, lines, ("strategy",), verdict.scored)


def sites_table(sites: SiteGains) -> Table:
    """Return a line for alone and for each strategy, on the sites' own test rows."""
    lines = []
    for name, against in sites.against.items():
        gained = (NONE, NONE)
        if sites.alone not in ("", name):
            gained = (sites.better(name), format_difference(against))
        values = sites.values[name]
        worst = sites.worst(name)
        lines.append(
            (
                name,
                number(values.mean()),
                number(sites.of_all.get(name, nan)),
                worst,
                number(values[worst]),
                of_rows(sites.rows[worst]),
                *gained,
            )
        )
    header = (
        "model",
        "own rows: mean",
        "global head",
        "worst site",
        "its value",
        "its test rows",
        "sites better than alone",
        f"against {sites.alone}",
    )
    title = f"{spoken(sites.metric)} on the sites' own test rows"
    return _table(header, lines, ("model", "worst site"), title)


def of_rows(rows: float) -> str:
    """Return a number of test rows; few are marked."""
    return f"{rows:.0f}, few" if rows < FEW_ROWS else f"{rows:.0f}"


def lost_table(rows: Iterable[Row]) -> Table | None:
    """Return lost replies by strategy, client and reason, most frequent first.

    The strategy is left out if the rows have none.
    """
    rounds_of = defaultdict[tuple[str, ...], list[int]](list)
    for row in rows:
        for what in {"dropped", "failed"} & row.keys():
            loss = (row.get("strategy", NONE), row["client"], what, row[what])
            rounds_of[tuple(map(str, loss))].append(row["round"])
    if not rounds_of:
        return None
    lines = [
        (*names, str(len(rounds)), span(rounds), reason)
        for (*names, reason), rounds in rounds_of.items()
    ]
    lines.sort(key=lambda line: -int(line[3]))
    return _table(
        ("strategy", "client", "what", "times", "rounds", "reason"),
        lines,
        ("strategy", "client", "what", "reason"),
    )


def _table(
    header: Sequence[str],
    lines: Iterable[Sequence[str]],
    texts: Container[str],
    title: str = "",
) -> Table:
    """Return a table without the columns that are unknown in all lines."""
    columns = [
        column for column in zip(header, *lines, strict=True) if {*column[1:]} != {NONE}
    ]
    header, *lines = zip(*columns, strict=True)
    return Table(title, header, lines, texts)


class TableCell(NamedTuple):
    """A cell of a grid: its text, the strength of its colour, and its CSS class.

    The strength is between 0 and 1.
    """

    text: str
    strength: float
    kind: str = ""


#: The part, layer and round of a row of alignment.
_place = itemgetter("part", "layer", "round")
#: The names of columns; and the names of lines with their cells, empty ones are None.
Grid = tuple[Sequence[object], Mapping[str, Sequence[TableCell | None]]]


def clients_grid(
    counts: Sequence[Sequence[int]], names: Sequence[str], sites: Sequence[object] = ()
) -> Grid:
    """Return the rows of each class (line) and client (column).

    ``counts`` is [clients][classes]. A last class may have no name. Without ``sites``,
    clients have numbers.
    """
    by_class = [*zip(*counts, strict=True)]
    most = max(1, *map(max, counts))
    lines = [*names, "no class" if names else "rows"]
    grid = {}
    # There may be no rows without a class.
    for line, by_client in zip(lines, by_class, strict=False):
        grid[line] = [TableCell(str(count), count / most) for count in by_client]
    clients = zip(sites or range(len(counts)), counts, strict=True)
    return [f"{client} ({sum(rows)})" for client, rows in clients], grid


def heat_map(rows: Iterable[Row]) -> Grid:
    """Return the share of the squared distance found by part and layer (line) and round
    (column).

    Distances are summed over clients, seeds and groups before they are divided. A share
    of no more than chance is of the kind ``chance``, a negative one ``grew``. The rows
    are of one strategy, with ``round``, ``part``, ``layer``, ``before``, ``after``,
    ``moved``, ``found`` and perhaps ``chance``.
    """
    cells = {
        place: _share_cell(shares) for place, shares in shares_by(rows, _place).items()
    }
    rounds = sorted({round_ for _, _, round_ in cells})
    # Parts stand in the order of the rows, and their layers in ascending order.
    layers_of: dict[str, set[int]] = {}
    for part, layer, _ in cells:
        layers_of.setdefault(part, set()).add(layer)
    grid = {}
    for part, layers in layers_of.items():
        for layer in sorted(layers):
            name = part if layer == NO_LAYER else f"{part}, layer {layer}"
            grid[name] = [cells.get((part, layer, round_)) for round_ in rounds]
    return rounds, grid


def _share_cell(shares: Shares) -> TableCell:
    share = shares.share if abs(shares.share) >= NOTHING else 0.0
    by_chance = shares.chance is not None and shares.ratio <= 1
    kind = "found"
    if not share or by_chance:
        kind = "chance"
    elif share < 0:
        kind = "grew"
    return TableCell(f"{100 * share:z.0f}", min(abs(share) / FULL, 1.0), kind)


def format_difference(difference: Paired) -> str:
    """Return ``+0.095 [+0.061, +0.129]``, or the verdict if there is no number."""
    if difference.verdict == "same":
        return NO_DIFFERENCE
    if isnan(difference.mean):
        return difference.verdict
    return format_interval(difference, "+")


def format_interval(value: Paired, sign: Literal["", "+"] = "") -> str:
    """Return ``0.412 [0.301, 0.523]``, without an unknown interval."""
    mean = number(value.mean, sign)
    if sign and not round(value.mean, DIGITS):
        mean = NO_DIFFERENCE
    if isnan(value.smallest):
        return mean
    low = number(value.mean - value.smallest, sign)
    high = number(value.mean + value.smallest, sign)
    return f"{mean} [{low}, {high}]"


def number(value: float, sign: Literal["", "+"] = "") -> str:
    """Return a number with three decimals, or digits if it is small or large.

    NaN is a dash.
    """
    if isnan(value):
        return NONE
    value = round(value, DIGITS)
    size = abs(value)
    style = ".3g"
    if size == 0 or 0.001 <= size < 100:
        style = ".3f"
    elif 100 <= size < 1e6:
        style = ".0f"
    return f"{value:{sign if value else 'z'}{style}}"


def spoken(metric: str) -> str:
    """Return a metric's name in a sentence: ``macro F1``."""
    return metric.replace("_", " ").replace("f1", "F1")
