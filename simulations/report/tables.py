"""Tables for the terminal, Markdown and HTML, and formats of numbers and differences."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedrot.simulations.summary import Paired, Row, Standing, Verdict, described

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

#: Words up to this number of characters are never broken.
WIDEST = 26
#: What stands where there is no number.
NONE = "-"


@dataclass(frozen=True)
class Table:
    """A table. Rich prints it, and the Jinja template renders it as HTML.

    Columns in ``texts`` hold names: they are left-aligned and may be broken. Others are right-aligned.
    """

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    texts: Container[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
        table.title_justify = "left"
        table.title = Text(self.title) if self.title else None
        for index, name in enumerate(self.header):
            cells = [line[index] for line in self.lines]
            if name in self.texts:
                widest = max(map(len, " ".join([name, *cells]).split()))
                table.add_column(name, overflow="fold", min_width=min(widest, WIDEST))
            else:  # only its name is broken
                table.add_column(name, justify="right", width=max(map(len, [*name.split(), *cells])))
        for line in self.lines:
            # As Text, brackets in names and intervals are not markup.
            table.add_row(*map(Text, line))
        yield table


def pipe_table(header: Sequence[str], rows: Iterable[Sequence[str]], texts: Container[str]) -> str:
    """Return a Markdown table; columns in ``texts`` are left-aligned, others right-aligned."""
    rule = ["---" if name in texts else "---:" for name in header]
    escaped = [[_in_markdown(cell) for cell in line] for line in (header, rule, *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _in_markdown(cell: str) -> str:
    """Return a cell on one line, with HTML and bars escaped."""
    return " ".join(cell.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").split())


def compact_table(found: Verdict) -> Table:
    """Return a line per strategy: judged metrics, difference from the reference, worst client, bytes.

    Columns without a number are left out.
    """
    against, metric = found.reference.name, found.judged[0]
    header = ("strategy", *map(spoken, found.judged), f"against {against}", "worst client", "MB")
    lines = [
        (
            own.name,
            *(number(own.mean(name)) for name in found.judged),
            NONE if own is found.reference else format_difference(own.against[metric]),
            number(own.worst),
            number(own.traffic / 1e6),
        )
        for own in found.standings
    ]
    columns = [column for column in zip(header, *lines, strict=True) if {*column[1:]} != {NONE}]
    header, *lines = zip(*columns, strict=True)
    return Table("", header, lines, texts=header[:1])


def metric_table(found: Verdict, metric: str) -> Table:
    """Return a line per strategy: mean and spread of one metric, and difference."""
    lines = []
    for own in found.standings:
        values, paired = [*own.values.get(metric, {}).values()], own.against.get(metric)
        if paired is not None and values:
            sd = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
            style = number_style(own.mean(metric), sd)
            spread = "" if math.isnan(sd) else f" ± {sd:{style}}"
            compared = NONE if own is found.reference else format_difference(paired)
            lines.append((own.name, f"{own.mean(metric):{style}}{spread}", compared))
    header = ("strategy", "mean ± sd", f"against {found.reference.name}")
    return Table(described(metric), header, lines, texts=header[:1])


def lost_table(rows: Iterable[Row]) -> list[Table]:
    """Return lost replies by strategy (if the rows have one), client and reason, most frequent first.

    There is no table without lost replies.
    """
    found: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        for what in {"dropped", "failed"} & row.keys():
            key = (*([row["strategy"]] if "strategy" in row else []), row["client"], what, row[what])
            found.setdefault(tuple(map(str, key)), []).append(row["round"])
    lines = [
        (*key[:-1], str(len(rounds)), " to ".join(map(str, sorted({min(rounds), max(rounds)}))), key[-1])
        for key, rounds in sorted(found.items(), key=lambda item: -len(item[1]))
    ]
    header = ("strategy", "client", "what", "times", "rounds", "reason")
    shown = header[-len(lines[0]) :] if lines else ()
    return [Table("", shown, lines, texts={*header} - {"times", "rounds"})] if lines else []


def format_difference(difference: Paired) -> str:
    """Return ``+0.095 [+0.061, +0.129]``, or the verdict if there is no number."""
    known = difference.n and difference.verdict != "same" and not math.isnan(difference.mean)
    return format_interval(difference, sign="+") if known else difference.verdict


def format_interval(value: Paired, sign: Literal["", "+"] = "", interval: bool = True) -> str:
    """Return ``0.412 [0.301, 0.523]``, without the interval if it is NaN or not wanted."""
    bounds = (value.ci_low, value.ci_high) if interval and not math.isnan(value.ci_low) else ()
    clear = bool(bounds) and value.ci_low * value.ci_high > 0
    # An interval that excludes 0 is not shown as [+0.000, +0.000].
    more = 2 if clear and min(map(abs, bounds)) < 0.0005 else 0
    style = f"{sign}z" + number_style(value.mean, *bounds, decimals=3 + more)
    shown = ", ".join(f"{bound:{style}}" for bound in bounds)
    return f"{value.mean:{style}}" + (f" [{shown}]" if bounds else "")


def number_style(*values: float, decimals: int = 3) -> str:
    """Return the format of numbers: a decimal less per integer digit, an exponent from a million."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest >= 1e6:
        return f".{decimals}g"
    return f".{max(0, decimals + 1 - len(str(int(largest))))}f"


def number(value: float) -> str:
    """Return a number, or a dash if it is NaN."""
    return NONE if math.isnan(value) else f"{value:z{number_style(value)}}"


def spoken(metric: str) -> str:
    """Return a metric's name in a sentence: ``macro F1``."""
    return metric.replace("_", " ").replace("f1", "F1")


def seeds(standings: Iterable[Standing]) -> str:
    """Return the number of seeds in words: ``5 seeds``, ``3 to 5 seeds``."""
    counts = [own.seeds for own in standings]
    least, most = min(counts), max(counts)
    return f"{most if least == most else f'{least} to {most}'} seed{'s' if most > 1 else ''}"
