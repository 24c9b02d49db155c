"""Tables of results for the terminal, Markdown and HTML, and formats of numbers and differences."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedrot.simulations.report.summaries import (
    BASELINE,
    Paired,
    Result,
    Row,
    by_setting,
    described,
    headline,
    results,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

#: Largest number of characters in a line of a name; longer names are broken, see ``pieces``.
WIDEST = 26
#: Words up to this number of characters are never broken; very long words have pieces of this size.
SHORT = 10
#: Largest number of a client's classes on the terminal.
MOST_CLASSES = 8
#: Verdicts for which the difference is not shown.
SAME = ("identical", "equal but for rounding")
EXPLAINED = "Paired by seed. Within noise of x: these seeds can show only a difference above x."


@dataclass(frozen=True)
class Table:
    """A table of at most five columns. Rich prints it, and the Jinja template renders it as HTML.

    Columns in ``texts`` hold names: they are left-aligned and may be broken. Others are right-aligned.
    """

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    texts: Container[str] = ()
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title, caption=self.caption or None, title_justify="left")
        for name in self.header:
            table.add_column(name, justify="left" if name in self.texts else "right", overflow="fold")
        for line in self.lines:
            # As Text, brackets in names and intervals are not markup.
            table.add_row(*(Text(" ".join(map(_broken, cell.split()))) for cell in line))
        columns = [list(map(str, column.cells)) for column in table.columns]
        # Each column needs two spaces and a rule, and the table one more rule.
        widths = _widths(columns, [*self.header], options.max_width - 3 * len(columns) - 1)
        for column, width in zip(table.columns, widths, strict=True):
            column.width = width
        yield table

    def markdown(self) -> str:
        """Return the table as Markdown, with its title above and its caption below."""
        table = pipe_table(self.header, self.lines, self.texts)
        title = f"**{_in_markdown(self.title)}**\n\n" if self.title else ""
        return title + table + (f"\n{_in_markdown(self.caption)}\n" if self.caption else "")


def pieces(word: str) -> list[str]:
    """Split a long word after signs, and parts above ``WIDEST`` into ``SHORT`` characters each."""
    if len(word) <= SHORT:
        return [word]
    names = re.findall(r"[^+@/,_-]*[+@/,_-]|[^+@/,_-]+", word)
    sizes = [len(name) if len(name) <= WIDEST else SHORT for name in names]
    return [
        name[place : place + size]
        for name, size in zip(names, sizes, strict=True)
        for place in range(0, len(name), size)
    ]


def _broken(word: str) -> str:
    """Break a word into lines of at most ``WIDEST`` characters."""
    lines = [""]
    for piece in pieces(word):
        if len(lines[-1] + piece) > WIDEST:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _widths(columns: Sequence[Sequence[str]], header: Sequence[str], room: int) -> list[int]:
    """Return widths of columns that fit into ``room``, or wider ones if a word would be cut."""
    cells = [[name, *column] for name, column in zip(header, columns, strict=True)]
    widths = [max((len(line) for cell in own for line in cell.splitlines()), default=0) for own in cells]
    words = [max((len(word) for cell in own for word in cell.split()), default=0) for own in cells]
    while sum(widths) > room and widths != words:
        spare = [width if width > word else 0 for width, word in zip(widths, words, strict=True)]
        widths[spare.index(max(spare))] -= 1
    return widths


def result_tables(rows: Sequence[Row], metrics: Sequence[str] | None = None) -> list[Table]:
    """Return the results of the final round, one table per setting and metric.

    If ``metrics`` is None, they are the headline metric of the setting and the loss.
    """
    found = []
    for setting, own in by_setting(rows).items():
        scores = results(own)
        for metric in headline(own) if metrics is None else metrics:
            lines = [score for score in scores if score.place.metric == metric]
            if lines:
                found.append(_result_table(setting, metric, lines))
    return found


def _result_table(setting: str, metric: str, scores: Sequence[Result]) -> Table:
    several = len({score.place.start for score in scores}) > 1
    seeds = max(score.n for score in scores)
    names = ["start", "arm"] if several else ["arm"]
    lines = [
        [
            *([score.place.start] if several else []),
            score.place.arm,
            format_score(score) + ("" if score.n == seeds else f" ({score.n} seeds)"),
            *_difference_cells(score.difference, seeds),
        ]
        for score in scores
    ]
    return Table(
        ": ".join(filter(None, [setting, f"{described(metric)}, final round, {seeds} seed(s)"])),
        [*names, "mean ± sd", f"difference from {BASELINE} [95 % t interval]", "verdict"],
        lines,
        texts=names,
        caption=EXPLAINED,
    )


def _difference_cells(difference: Paired | None, seeds: int) -> list[str]:
    """Return the difference with its interval, and the verdict, with its number of seeds if needed."""
    if difference is None:
        return ["-", "-"]
    known = not math.isnan(difference.mean) and difference.verdict not in SAME
    shown = format_interval(difference, sign="+") if known else "-"
    counted = "" if difference.n in (0, seeds) else f" ({difference.n} seeds)"
    return [shown, format_verdict(difference) + counted]


def format_score(score: Result) -> str:
    """Return ``0.694 ± 0.012``, without the spread for one seed."""
    style = number_style(score.mean, score.sd)
    return f"{score.mean:{style}}" + ("" if math.isnan(score.sd) else f" ± {score.sd:{style}}")


def format_verdict(difference: Paired) -> str:
    """Return ``better``, or ``within noise of 0.034`` with the smallest difference outside noise."""
    if difference.verdict != "within noise":
        return difference.verdict
    return f"within noise of {difference.smallest:{_style(difference)}}"


def format_difference(difference: Paired) -> str:
    """Return ``+0.095 [+0.061, +0.129] better``, without the interval if there is none."""
    if difference.n == 0 or difference.verdict in SAME:
        return difference.verdict
    return f"{format_interval(difference, sign='+')} {format_verdict(difference)}"


def format_interval(value: Paired, sign: Literal["", "+"] = "", interval: bool = True) -> str:
    """Return ``0.412 [0.301, 0.523]``, without the interval if it is NaN or not wanted."""
    bounds = (value.ci_low, value.ci_high) if interval and not math.isnan(value.ci_low) else ()
    style = sign + _style(value, interval)
    shown = ", ".join(f"{bound:{style}}" for bound in bounds)
    return f"{value.mean:{style}}" + (f" [{shown}]" if bounds else "")


def _style(value: Paired, interval: bool = True) -> str:
    bounds = (value.ci_low, value.ci_high) if interval and not math.isnan(value.ci_low) else ()
    clear = [abs(bound) for bound in bounds if value.ci_low * value.ci_high > 0]
    # An interval that excludes 0 is not shown as [+0.000, +0.000].
    more = 2 if clear and min(clear) < 0.0005 else 0
    return number_style(value.mean, *bounds, decimals=3 + more)


def number_style(*values: float, decimals: int = 3) -> str:
    """Return the format of numbers: a decimal less per integer digit, an exponent from a million."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest >= 1e6:
        return f".{decimals}g"
    return f".{max(0, decimals + 1 - len(str(int(largest))))}f"


def pipe_table(header: Sequence[str], rows: Iterable[Sequence[str]], texts: Container[str]) -> str:
    """Return a Markdown table; columns in ``texts`` are left-aligned, others right-aligned."""
    rule = ["---" if name in texts else "---:" for name in header]
    escaped = [[_in_markdown(cell) for cell in line] for line in (header, rule, *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _in_markdown(cell: str) -> str:
    """Return a cell on one line, with HTML and bars escaped."""
    return " ".join(cell.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").split())


def partition_table(
    counts: Sequence[Sequence[int]],
    names: Sequence[str],
    setting: str,
    seed: int,
    most: int | None = MOST_CLASSES,
) -> Table:
    """Return the table of rows per client and class; ``counts`` is [clients][classes].

    At most ``most`` classes of a client are listed, the most frequent first; the rest is one sum.
    """
    header = ("client", "rows", "rows of each class")
    lines = [
        [str(client), str(sum(own)), _counted(own, names, most)] for client, own in enumerate(counts)
    ]
    return Table(f"Rows per client: {setting}, seed {seed}", header, lines, texts=header[2:])


def _counted(counts: Sequence[int], names: Sequence[str], most: int | None) -> str:
    order = sorted(filter(counts.__getitem__, range(len(counts))), key=lambda index: -counts[index])
    known = dict(enumerate(names))
    shown = [f"{known.get(index, 'none')} {counts[index]}" for index in order[:most]]
    rest = [counts[index] for index in order[len(shown) :]]
    if rest:
        shown.append(f"{len(rest)} others {sum(rest)}")
    return ", ".join(shown)
