"""Tables for the terminal, Markdown and HTML, and formats of numbers and differences."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedrot.simulations.summary import Paired, Standing, Verdict, described

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

#: Words up to this number of characters are never broken; longer ones are broken after signs.
SHORT, WIDEST = 10, 26
#: Verdicts for which a difference is no number.
SAME = ("identical", "equal but for rounding")
PAIRED = (
    "Differences are paired by seed, with 95 % t intervals in brackets. An interval that contains 0 "
    "decides nothing. One of 40 strategies that change nothing looks better by luck."
)
#: What stands where there is no number.
NONE = "–"


@dataclass(frozen=True)
class Table:
    """A table. Rich prints it, and the Jinja template renders it as HTML.

    Columns in ``texts`` hold names: they are left-aligned and may be broken. Others are right-aligned.
    """

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    texts: Container[str] = ()
    caption: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=self.title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False
        )
        for index, name in enumerate(self.header):
            words = " ".join([name, *(line[index] for line in self.lines)]).split()
            widest = max(len(piece) for word in words for piece in pieces(word))
            justify: Literal["left", "right"] = "left" if name in self.texts else "right"
            table.add_column(name, justify=justify, overflow="fold", min_width=widest)
        for line in self.lines:
            # As Text, brackets in names and intervals are not markup.
            table.add_row(*map(Text, line))
        yield table
        if self.caption:
            yield Text(self.caption, style="dim")

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


def pipe_table(header: Sequence[str], rows: Iterable[Sequence[str]], texts: Container[str]) -> str:
    """Return a Markdown table; columns in ``texts`` are left-aligned, others right-aligned."""
    rule = ["---" if name in texts else "---:" for name in header]
    escaped = [[_in_markdown(cell) for cell in line] for line in (header, rule, *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _in_markdown(cell: str) -> str:
    """Return a cell on one line, with HTML and bars escaped."""
    return " ".join(cell.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").split())


def compact_table(found: Verdict, title: str = "") -> Table:
    """Return a line per strategy: judged metrics, difference from the reference, worst client, bytes."""
    against = found.reference.name if found.reference else ""
    metric = found.judged[0]
    header = ["strategy", *map(spoken, found.judged), f"against {against}", "worst client", "MB"]
    lines = [
        [
            own.name,
            *(number(own.mean(name)) for name in found.judged),
            NONE if own is found.reference else format_difference(own.against[metric]),
            number(own.worst),
            number(own.traffic / 1e6),
        ]
        for own in found.standings
    ]
    unused = [i for i, name in enumerate(header) if all(line[i] == NONE for line in lines)]
    kept = [[cell for i, cell in enumerate(line) if i not in unused] for line in (header, *lines)]
    caption = (
        f"Means over {seeds(found.standings)} after the last round. Against {against}: difference of "
        f"{spoken(metric)}. {PAIRED}"
    )
    return Table(title, kept[0], kept[1:], texts=header[:1], caption=caption)


def metric_table(found: Verdict, metric: str) -> Table:
    """Return a line per strategy: mean and spread of one metric, difference, verdict and p-value."""
    lines = [
        [
            own.name,
            _spread([*own.values[metric].values()]),
            *(
                (NONE, NONE, NONE)
                if own is found.reference
                else (
                    _known(paired),
                    _verdict(paired),
                    NONE if math.isnan(paired.p) else f"{paired.p:.2g}",
                )
            ),
        ]
        for own in found.standings
        if metric in own.values
        for paired in [own.against[metric]]
    ]
    header = ("strategy", "mean ± sd", "difference", "verdict", "p")
    return Table(described(metric).replace("_", " "), header, lines, texts=("strategy", "verdict"))


def _spread(values: Sequence[float]) -> str:
    import numpy as np

    mean, sd = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    style = number_style(mean, sd)
    return f"{mean:{style}}" + (f" ± {sd:{style}}" if math.isfinite(sd) else "")


def _known(difference: Paired) -> str:
    known = difference.n and difference.verdict not in SAME and not math.isnan(difference.mean)
    return format_interval(difference, sign="+") if known else NONE


def _verdict(difference: Paired) -> str:
    """Return a verdict, with the smallest difference that would show: ``within noise of 0.034``."""
    noise = difference.verdict == "within noise"
    return difference.verdict + (f" of {difference.smallest:{_style(difference)}}" if noise else "")


def format_difference(difference: Paired) -> str:
    """Return ``+0.095 [+0.061, +0.129]``, or the verdict if there is no number."""
    return difference.verdict if _known(difference) == NONE else _known(difference)


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


def number(value: float) -> str:
    """Return a number, or a dash if it is NaN."""
    return NONE if math.isnan(value) else f"{value:{number_style(value)}}"


def spoken(metric: str) -> str:
    """Return a metric's name in a sentence: ``macro F1``."""
    return metric.replace("_", " ").replace("f1", "F1")


def seeds(standings: Iterable[Standing]) -> str:
    """Return the number of seeds in words: ``5 seeds``, ``3 to 5 seeds``."""
    counts = sorted({own.seeds for own in standings})
    if counts in ([], [1]):
        return "1 seed" if counts else "no seed"
    return f"{' to '.join(map(str, sorted({counts[0], counts[-1]})))} seeds"


def partition_table(counts: Sequence[Sequence[int]], names: Sequence[str], title: str) -> Table:
    """Return the table of rows per client and class; ``counts`` is [clients][classes]."""
    lines = []
    for client, own in enumerate(counts):
        order = sorted((i for i, count in enumerate(own) if count), key=lambda i: -own[i])
        classes = (f"{names[i] if i < len(names) else 'no class'} {own[i]}" for i in order)
        lines.append([str(client), str(sum(own)), ", ".join(classes) if names else NONE])
    return Table(title, ("client", "rows", "rows of each class"), lines, texts=("rows of each class",))
