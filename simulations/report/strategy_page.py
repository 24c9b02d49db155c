"""The HTML page of a strategy's rows file, and its sections."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrot.diagnosis import ALIGNED, PLAIN, WHOLE, diagnosis_of
from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.report import heat_map
from fedrot.simulations.report.html_page import HtmlPage, Section, data_uri, list_of
from fedrot.simulations.report.plots import rounds_plot
from fedrot.simulations.report.summaries import Row
from fedrot.simulations.report.tables import Table, number_style
from fedrot.strategies.reporting.verdict import ends

#: Stages of a round in which its model is evaluated, in words.
SCORING = {"server": "at the server", "evaluate": "at the clients"}


@dataclass(frozen=True)
class StrategyResults:
    """Rows about replies, and rows of metrics by round and stage."""

    rows: Sequence[Row]
    stages: Sequence[Row]


def write_strategy_report(report: Path, out: Path | None = None) -> Path:
    """Write the page of the rows of ``FedRot`` or ``Aligned``; return the page's path.

    Args:
        report: JSON lines that the strategy wrote, ``Reporting(rows=...)``.
        out: the page; None: the path of ``report`` with the suffix ``.html``.

    Raises:
        ValueError: the file was not written by a strategy.
        OSError: the file cannot be read, or the page cannot be written.
    """
    every = read_rows(report.parent, report.name)
    if not every or not all(map(_is_row, every)):
        raise ValueError(f"'{report}' is no file of Reporting(rows=...): JSON lines, each with 'round'.")
    stages = [row for row in every if "stage" in row]
    results = StrategyResults([row for row in every if "stage" not in row], stages)
    return PAGE.write(out or report.with_suffix(".html"), report.stem, results)


def _is_row(row: Row) -> bool:
    """Return whether a row has the fields of a strategy's rows."""
    whole = "before" not in row or {"after", "found", "moved", "part", "layer", "client"} <= row.keys()
    return "round" in row and ("metrics" in row) == ("stage" in row) and whole


PAGE: HtmlPage[StrategyResults] = HtmlPage()

#: Results of a round's diagnosis, in words.
_FOUND = {
    PLAIN: "alignment found nothing beyond chance",
    ALIGNED: "the clients are in different coordinates",
    WHOLE: "replies were in another basis, and were matched as whole models",
}
_WORDS = {
    "different coordinates": "two clients have the same head in coordinates that differ by a rotation",
    "chance": "the squared distance that the best rotation removes from noise alone",
    "moved": "a group of weights was brought into the anchor's coordinates before averaging",
}


@PAGE.section
def verdict(of: StrategyResults) -> Section:
    """Results of alignment in the first and the last round, and changes of the scores."""
    aligned: dict[int, list[Row]] = {}
    for row in of.rows:
        if "before" in row:
            aligned.setdefault(int(row["round"]), []).append(row)
    said = []
    if aligned:
        moved = sum(any(row["moved"] for row in rows) for rows in aligned.values())
        said.append(f"Alignment moved groups in {moved} of {len(aligned)} rounds.")
    said += [f"Round {n}: {_FOUND[diagnosis_of(aligned[n]).choice]}." for n in ends(aligned)]
    told = {int(row["round"]): str(row["said"]) for row in of.rows if "said" in row}
    said += [f"Round {n}: {told[n]}." for n in ends(told)]
    rounds = len({row["round"] for row in of.rows})
    said += _changes(of.stages)
    return Section("What happened", f"{rounds} rounds reported.", said, _WORDS)


def _guarded(aligned: Mapping[int, float], plain: Mapping[int, float]) -> list[str]:
    """Return sentences about both means in the guard's first and last comparison."""
    return [
        f"Round {n}: the guard measured {aligned[n]:{style}} for the aligned mean and "
        f"{plain[n]:{style}} for the plain mean."
        for n in ends(aligned)
        for style in [number_style(aligned[n], plain[n])]
    ]


def _changes(stages: Iterable[Row]) -> list[str]:
    """Return sentences about the guard's comparisons and the change of each score over the run."""
    series = _series(stages)
    said = _guarded(*(series.get(f"train/fedrot-guard-{name}", {}) for name in ("aligned", "plain")))
    for name, values in series.items():
        stage, _, metric = name.partition("/")
        if stage in SCORING and not metric.startswith("fedrot-") and len(values) > 1:
            first, last = min(values), max(values)
            style = number_style(values[first], values[last])
            change = f"{values[first]:{style}} in round {first} → {values[last]:{style}} in round {last}"
            said.append(f"{metric} ({SCORING[stage]}): {change}.")
    return said


@PAGE.section
def removed(of: StrategyResults) -> Section:
    """The heat map of the alignment."""
    title = "What alignment found, by layer and round"
    aligned = [row for row in of.rows if "before" in row]
    if not aligned:
        return Section(title, "No aligned replies are reported.")
    return Section(title, pictures={heat_map.caption(aligned): _drawn(heat_map.alignment_plot, aligned)})


@PAGE.section
def lost(of: StrategyResults) -> Section:
    """Lost replies by client and reason, the most frequent first."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for row in of.rows:
        for what in [key for key in ("dropped", "failed") if key in row]:
            found.setdefault((str(row["client"]), what, str(row[what])), []).append(row["round"])
    if not found:
        return Section("Lost replies", "None.")
    lines = [
        [
            client,
            what,
            str(len(rounds)),
            " to ".join(map(str, sorted({min(rounds), max(rounds)}))),
            reason,
        ]
        for (client, what, reason), rounds in found.items()
    ]
    lines.sort(key=lambda line: (-int(line[2]), int(line[0])))
    header = ("client", "what", "times", "rounds", "reason")
    return Section("Lost replies", tables=[Table("", header, lines, texts=("client", "what", "reason"))])


@PAGE.section
def failed(of: StrategyResults) -> Section | None:
    """Rounds without a new model."""
    rounds = [f"Round {row['round']}: {row['lost']}" for row in of.rows if "lost" in row]
    return list_of("Rounds without a new model", rounds)


@PAGE.section
def metrics(of: StrategyResults) -> Section | None:
    """Curves of the metrics that change, and values of constant metrics."""
    series = _series(of.stages)
    rounds = {int(row["round"]) for row in of.stages}
    alike = {
        name: s for name, s in series.items() if len(set(s.values())) == 1 and len(s) == len(rounds)
    }
    same = {name: next(iter(s.values())) for name, s in alike.items()}
    changing = {name: s for name, s in series.items() if name not in same}
    if not changing:
        return None
    constant = ", ".join(f"{name} = {value:g}" for name, value in same.items())
    text = f"The same in all rounds: {constant}." if constant else ""
    drawn = {"Metrics by round, a panel each": _drawn(rounds_plot, changing)}
    return Section("Metrics by round", text, pictures=drawn)


def _series(stages: Iterable[Row]) -> dict[str, dict[int, float]]:
    """Return the metrics by name and round; a list becomes one metric per entry."""
    series: dict[str, dict[int, float]] = {}
    for row in stages:
        for name, value in row["metrics"].items():
            full = f"{row['stage']}/{name}"
            several = isinstance(value, list)
            numbers = {f"{full}/{i}": v for i, v in enumerate(value)} if several else {full: value}
            for own, number in numbers.items():
                number = math.nan if number is None else float(number)
                series.setdefault(own, {})[int(row["round"])] = number
    return series


def _drawn(plot: Callable[[Path, Any], Path], values: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return data_uri(plot(Path(folder) / "plot.png", values))
