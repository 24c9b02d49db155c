"""Results of a run in words and tables: for the terminal, for Markdown and for the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedrot.simulations.report.summaries import (
    Paired,
    Row,
    Summary,
    by_setting,
    compare_seeds,
    final_values,
    metrics_in,
    removed_shares,
    setting_of,
    summarise,
)

if TYPE_CHECKING:
    from rich.table import Table

BASELINE = "plain"
# Below this share of the squared distance, alignment of a layer is called without effect.
NEGLIGIBLE = 0.01


@dataclass(frozen=True)
class Line:
    """One line of the result table: an arm, its metrics, and its difference from the baseline."""

    setting: str
    start: str
    arm: str
    seeds: int
    scores: tuple[Summary | None, ...]
    differences: tuple[Paired | None, ...]


def result_lines(rows: Sequence[Row], metrics: Sequence[str], baseline: str = BASELINE) -> list[Line]:
    """One line per setting, start and arm, with a score and a difference per metric.

    Differences are ``None`` for the baseline itself and where a setting and start have none.
    """
    values = final_values(rows)
    scores = {(s.setting, s.start, s.arm, s.metric): s for s in summarise(rows, metrics)}
    lines = []
    for setting, start, arm in dict.fromkeys(key[:3] for key in scores):
        differences: list[Paired | None] = []
        for metric in metrics:
            ours = values.get((setting, start, arm, metric), {})
            theirs = values.get((setting, start, baseline, metric))
            comparable = arm != baseline and theirs is not None
            differences.append(compare_seeds(ours, theirs or {}, metric) if comparable else None)
        found = tuple(scores.get((setting, start, arm, metric)) for metric in metrics)
        seeds = max(score.n for score in found if score)
        lines.append(Line(setting, start, arm, seeds, found, tuple(differences)))
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
    if difference.n == 0 or difference.verdict == "identical":
        return difference.verdict
    style = "+" + number_style(difference.mean, difference.ci_low, difference.ci_high)
    interval = f" [{difference.ci_low:{style}}, {difference.ci_high:{style}}]"
    shown = "" if math.isnan(difference.ci_low) else interval
    return f"{difference.mean:{style}}{shown} {difference.verdict}"


def number_style(*values: float, decimals: int = 3) -> str:
    """Format of numbers shown together: a decimal less per digit, an exponent from a million on."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if largest >= 1e6:
        return f".{decimals}g"
    return f".{max(0, decimals + 1 - len(str(int(largest))))}f"


def headline(rows: Sequence[Row]) -> list[str]:
    """The headline metric of every setting, and the loss: what fits into a narrow table."""
    first = [metric for own in by_setting(rows).values() for metric in metrics_in(own)[:1]]
    return list(dict.fromkeys([*first, *metrics_in(rows)[-1:]]))


def summary_tables(rows: Sequence[Row], headline_metrics: Sequence[str] | None = None) -> list[Table]:
    """The final-round results for the terminal, one table per setting, fit for a narrow one.

    Args:
        headline_metrics: columns of the tables; the headline metric and the loss if not given. The
            difference from plain averaging is shown for the first.
    """
    tables = []
    for own in by_setting(rows).values():
        metrics = list(headline_metrics or headline(own))
        lines = result_lines(own, metrics)
        if lines:
            tables.append(_setting_table(lines, metrics))
    return tables


def _setting_table(lines: Sequence[Line], metrics: Sequence[str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    seeds = sorted({line.seeds for line in lines})
    counted = " to ".join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))
    table = Table(
        title=f"{lines[0].setting}: final round, mean ± sd, {counted} seed(s)",
        caption=f"Difference from {BASELINE}: paired by seed, two-sided 95 % t interval.",
    )
    several = len({line.start for line in lines}) > 1
    table.add_column("start" if several else "arm", no_wrap=True)
    if several:
        table.add_column("arm", no_wrap=True)
    for name in (*metrics, f"{metrics[0]} - {BASELINE}"):
        table.add_column(name, justify="right")
    for line in lines:
        cells = [*([line.start] if several else []), line.arm, *map(format_score, line.scores)]
        # Plain text: brackets in names and intervals are no markup.
        table.add_row(*map(Text, [*cells, format_difference(line.differences[0])]))
    return table


def markdown_table(
    rows: Sequence[Row], metrics: Sequence[str] | None = None, baseline: str = BASELINE
) -> str:
    """The final-round results as a Markdown table, with the paired difference of every metric.

    Args:
        metrics: the headline metric and the loss if not given.
    """
    metrics = list(metrics or headline(rows))
    against = [f"{metric}: difference from {baseline}" for metric in metrics]
    header = ["setting", "start", "arm", "seeds", *metrics, *against]
    lines = [
        [ln.setting, ln.start, ln.arm, str(ln.seeds)]
        + [format_score(score) for score in ln.scores]
        + [format_difference(difference) for difference in ln.differences]
        for ln in result_lines(rows, metrics, baseline)
    ]
    rule = ["---" if index < 3 else "---:" for index in range(len(header))]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in (header, rule, *lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"


def partition_table(
    counts: Sequence[Sequence[int]], names: Sequence[str], setting: str, seed: int
) -> Table:
    """Rows of each class per client, for the terminal; ``counts`` is [clients][classes]."""
    from rich.table import Table

    table = Table(title=f"Rows per client: {setting}, seed {seed}")
    for name in ("client", "rows", *names):
        table.add_column(name, justify="right")
    for client, row in enumerate(counts):
        table.add_row(*map(str, (client, sum(row), *row)))
    return table


def scrambling(lines: Sequence[Line], metrics: Sequence[str]) -> list[str]:
    """What scrambling the clients' coordinates cost every arm, against its own run of start same."""
    same = {(line.setting, line.arm): line for line in lines if line.start == "same"}
    said = []
    for line in lines:
        twin = same.get((line.setting, line.arm))
        if line.start != "scrambled" or twin is None:
            continue
        changes = [
            f"{metric} {theirs.mean:{style}} -> {ours.mean:{style}} ({ours.mean - theirs.mean:+{style}})"
            for metric, ours, theirs in zip(metrics, line.scores, twin.scores, strict=True)
            if ours is not None and theirs is not None
            for style in [number_style(ours.mean, theirs.mean, decimals=4)]
        ]
        said.append(f"{line.setting}, {line.arm}: {', '.join(changes)}.")
    return said


def findings(lines: Sequence[Line], metrics: Sequence[str], alignment: Sequence[Row]) -> list[str]:
    """Sentences on where alignment hurt, did nothing, or could not be done."""
    said = []
    for line in lines:
        for metric, difference in zip(metrics, line.differences, strict=True):
            if difference is not None:
                said += _doubts(line, metric, difference)
    return said + _idle_layers(alignment) + _dropped(alignment)


def _doubts(line: Line, metric: str, difference: Paired) -> list[str]:
    where = f"{line.setting or 'this run'}, start {line.start}: {line.arm}"
    change = format_difference(difference).removesuffix(f" {difference.verdict}")
    if difference.verdict == "worse":
        return [f"{where} hurt {metric} against {BASELINE}: {change}."]
    if difference.verdict == "identical":
        return [f"{where} gave exactly the {metric} of {BASELINE}."]
    if difference.verdict == "within noise":
        return [f"{where} made no measurable difference to {metric}: {change}."]
    if difference.verdict == "not finite":
        return [f"{where} or {BASELINE} diverged: {metric} is not finite."]
    return []


def _idle_layers(alignment: Sequence[Row]) -> list[str]:
    """Where alignment found next to nothing to remove."""
    idle: dict[tuple[str, str, str, str], list[str]] = {}
    for (setting, start, arm, part, layer), share in removed_shares(alignment).items():
        if share < NEGLIGIBLE:
            shown = f"{layer} ({100 * share:.2g} %)"
            idle.setdefault((setting, start, arm, part), []).append(shown)
    return [
        f"{setting or 'this run'}, start {start}: {arm} removed less than {100 * NEGLIGIBLE:.0f} % "
        f"of the squared distance by {part} in layer {', '.join(layers)}."
        for (setting, start, arm, part), layers in idle.items()
    ]


def failed_clients(rows: Sequence[Row]) -> list[str]:
    """Sentences on clients that failed or sent nothing usable."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        if row["metric"] == "fedrot-replies-failed" and row["value"] > 0:
            counts[(setting_of(row), str(row["start"]), str(row["arm"]))] += int(row["value"])
    return [
        f"{setting or 'this run'}, start {start}: {arm} went on without {count} client(s) that failed."
        for (setting, start, arm), count in counts.items()
    ]


def _dropped(alignment: Sequence[Row]) -> list[str]:
    reasons = Counter(
        (setting_of(row), str(row.get("arm")), str(row["dropped"]))
        for row in alignment
        if "dropped" in row
    )
    return [
        f"{setting or 'this run'}: {arm} dropped a reply {count} time(s): {reason}"
        for (setting, arm, reason), count in reasons.items()
    ]
