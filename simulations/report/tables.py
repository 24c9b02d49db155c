"""Tables of results: numbers and differences as text, for the terminal and for Markdown."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedrot.simulations.report.summaries import (
    Paired,
    Place,
    Row,
    Summary,
    by_setting,
    compare_seeds,
    final_values,
    headline,
    summarise,
)

if TYPE_CHECKING:
    from rich.console import JustifyMethod, OverflowMethod
    from rich.table import Table

BASELINE = "plain"
#: Classes with a column of their own in ``partition_table``; more would not fit into a terminal.
_CLASS_COLUMNS = 8


@dataclass(frozen=True)
class Line:
    """One line of the result table: an arm, its metrics, and its differences from the baseline."""

    setting: str
    start: str
    arm: str
    seeds: int
    scores: tuple[Summary | None, ...]
    differences: tuple[Paired | None, ...]


def result_lines(rows: Sequence[Row], metrics: Sequence[str]) -> list[Line]:
    """One line per setting, start and arm, with a score and a difference per metric.

    Differences are ``None`` for the baseline itself and where a setting and start have none.
    """
    values, scores = final_values(rows), summarise(rows, metrics)

    def difference(place: Place) -> Paired | None:
        theirs = values.get(place._replace(arm=BASELINE))
        if place.arm == BASELINE or theirs is None:
            return None
        return compare_seeds(values.get(place, {}), theirs, place.metric)

    lines = []
    for key in dict.fromkeys(place[:3] for place in scores):
        places = [Place(*key, metric) for metric in metrics]
        found = tuple(map(scores.get, places))
        seeds = max(score.n for score in found if score)
        lines.append(Line(*key, seeds, found, tuple(map(difference, places))))
    return lines


def format_score(score: Summary | None) -> str:
    """``0.694 ± 0.012``, without the spread if there is one seed."""
    if score is None:
        return "-"
    style = number_style(score.mean, score.sd)
    return f"{score.mean:{style}}" + ("" if math.isnan(score.sd) else f" ± {score.sd:{style}}")


def format_difference(difference: Paired | None) -> str:
    """``+0.095 [+0.061, +0.129] better``, without the interval if there is none."""
    if difference is None:
        return "-"
    if difference.n == 0 or difference.verdict in ("identical", "equal but for rounding"):
        return difference.verdict
    return f"{format_interval(difference, sign='+')} {difference.verdict}"


def format_interval(value: Paired, sign: Literal["", "+"] = "", interval: bool = True) -> str:
    """``0.412 [0.301, 0.523]``, without the interval if there is none or it is not wanted."""
    bounds = (value.ci_low, value.ci_high) if interval and not math.isnan(value.ci_low) else ()
    clear = [abs(bound) for bound in bounds if value.ci_low * value.ci_high > 0]
    # An interval that excludes 0 is not shown as [+0.000, +0.000].
    more = 2 if clear and min(clear) < 0.0005 else 0
    style = sign + number_style(value.mean, *bounds, decimals=3 + more)
    shown = ", ".join(f"{bound:{style}}" for bound in bounds)
    return f"{value.mean:{style}}" + (f" [{shown}]" if bounds else "")


def _with_seeds(difference: Paired | None, seeds: int) -> str:
    """``format_difference``, with the number of seeds where it is not that of the line."""
    shown = format_difference(difference)
    if difference is None or difference.n in (0, seeds):
        return shown
    return f"{shown} ({difference.n} seeds)"


def number_style(*values: float, decimals: int = 3) -> str:
    """Format of numbers shown together: a decimal less per digit, an exponent from a million on."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest >= 1e6:
        return f".{decimals}g"
    return f".{max(0, decimals + 1 - len(str(int(largest))))}f"


def terminal_table(
    title: str,
    columns: Iterable[str],
    texts: Container[str] = (),
    caption: str | None = None,
    fold: bool = False,
) -> Table:
    """Return an empty table; columns of ``texts`` are left-aligned, and cut or folded if too long."""
    from rich.table import Table

    table = Table(title=title, caption=caption, title_justify="left" if fold else "center")
    overflow: OverflowMethod = "fold" if fold else "ellipsis"
    for name in columns:
        justify: JustifyMethod = "left" if name in texts else "right"
        table.add_column(name, justify=justify, no_wrap=name in texts and not fold, overflow=overflow)
    return table


def pipe_table(header: Sequence[str], rows: Iterable[Sequence[str]], texts: Container[str]) -> str:
    """Return a Markdown table; columns of ``texts`` are left-aligned, others are right-aligned."""
    rule = ["---" if name in texts else "---:" for name in header]
    escaped = [[_in_markdown(cell) for cell in line] for line in (header, rule, *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def _in_markdown(cell: str) -> str:
    """Return a cell of one line, in which HTML and bars are text."""
    return " ".join(cell.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").split())


def summary_tables(rows: Sequence[Row]) -> list[Table]:
    """The final-round results for the terminal, a table per setting: headline metric and loss."""
    found = [(metrics := headline(own), result_lines(own, metrics)) for own in by_setting(rows).values()]
    return [_setting_table(lines, metrics) for metrics, lines in found if lines]


def _setting_table(lines: Sequence[Line], metrics: Sequence[str]) -> Table:
    from rich.text import Text

    seeds = sorted({line.seeds for line in lines})
    counted = " to ".join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))
    names = ("start", "arm") if len({line.start for line in lines}) > 1 else ("arm",)
    table = terminal_table(
        f"{lines[0].setting}: final round, mean ± sd, {counted} seed(s)",
        (*names, *metrics, f"{metrics[0]} - {BASELINE}"),
        texts=names,
        caption=f"Difference from {BASELINE}: paired by seed, two-sided 95 % t interval.",
        fold=True,
    )
    for line in lines:
        cells = [*(getattr(line, name) for name in names), *map(format_score, line.scores)]
        # Text: brackets in names and intervals are not markup.
        table.add_row(*map(Text, [*cells, format_difference(line.differences[0])]))
    return table


def markdown_table(rows: Sequence[Row], metrics: Sequence[str] | None = None) -> str:
    """The final-round results as Markdown; ``metrics`` are the headline metric and the loss if None."""
    metrics = list(metrics or headline(rows))
    against = [f"{metric}: difference from {BASELINE}" for metric in metrics]
    lines = [
        [ln.setting, ln.start, ln.arm, str(ln.seeds)]
        + [format_score(score) for score in ln.scores]
        + [_with_seeds(difference, ln.seeds) for difference in ln.differences]
        for ln in result_lines(rows, metrics)
    ]
    texts = ("setting", "start", "arm")
    return pipe_table([*texts, "seeds", *metrics, *against], lines, texts)


def partition_table(
    counts: Sequence[Sequence[int]], names: Sequence[str], setting: str, seed: int
) -> Table:
    """Rows of each class per client, for the terminal; ``counts`` is [clients][classes].

    Of many classes the most frequent have a column, and the others one together.
    """
    if len(names) > _CLASS_COLUMNS + 1:
        totals = [sum(column) for column in zip(*counts, strict=True)]
        kept = sorted(sorted(range(len(names)), key=lambda c: -totals[c])[:_CLASS_COLUMNS])
        left = f"{len(names) - len(kept)} others"
        counts = [[*(row[c] for c in kept), sum(row) - sum(row[c] for c in kept)] for row in counts]
        names = [*(names[c] for c in kept), left]
    table = terminal_table(f"Rows per client: {setting}, seed {seed}", ("client", "rows", *names))
    for client, row in enumerate(counts):
        table.add_row(*map(str, (client, sum(row), *row)))
    return table
