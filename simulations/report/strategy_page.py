"""The HTML page of a strategy's rows file, and its sections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedrot.diagnosis import ALIGNED, PLAIN, WHOLE, diagnosis_of
from fedrot.simulations.folder import read_rows
from fedrot.simulations.report.heat_map import alignment_pictures
from fedrot.simulations.report.page import Page, Picture, Section
from fedrot.simulations.report.plots import data_uri, rounds_plot
from fedrot.simulations.report.tables import Table, number_style
from fedrot.simulations.summary import Row
from fedrot.strategies.reporting.verdict import ends

#: Stages of a round in which its model is evaluated, in words.
SCORING = {"server": "at the server", "evaluate": "at the clients"}
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


@dataclass(frozen=True)
class StrategyResults:
    """Rows about replies, and rows of metrics by round and stage."""

    rows: Sequence[Row]
    stages: Sequence[Row]


def write_strategy_report(file: Path, out: Path | None = None) -> Path:
    """Write the page of the rows of ``FedRot`` or ``Aligned``; return the page's path.

    Args:
        file: JSON lines that the strategy wrote, ``Reporting(rows=...)``.
        out: the page; None: the path of ``file`` with the suffix ``.html``.

    Raises:
        ValueError: the file was not written by a strategy.
        OSError: the file cannot be read, or the page cannot be written.
    """
    every = read_rows(file)
    if not every or not all(map(_is_row, every)):
        raise ValueError(f"'{file}' is no file of Reporting(rows=...): JSON lines, each with 'round'.")
    stages = [row for row in every if "stage" in row]
    results = StrategyResults([row for row in every if "stage" not in row], stages)
    return PAGE.write(out or file.with_suffix(".html"), file.stem, results)


def _is_row(row: Row) -> bool:
    """Return whether a row has the fields of a strategy's rows."""
    whole = "before" not in row or {"after", "found", "moved", "part", "layer", "client"} <= row.keys()
    return "round" in row and ("metrics" in row) == ("stage" in row) and whole


PAGE: Page[StrategyResults] = Page()


@PAGE.section
def verdict(of: StrategyResults) -> Section:
    """Results of alignment in the first and the last round, and changes of the scores."""
    aligned: dict[int, list[Row]] = {}
    for row in of.rows:
        if "before" in row:
            aligned.setdefault(int(row["round"]), []).append(row)
    moved = sum(any(row["moved"] for row in rows) for rows in aligned.values())
    rounds = len({row["round"] for row in (*of.rows, *of.stages)})
    found = f"alignment moved groups in {moved} of {len(aligned)}" if aligned else "none was aligned"
    told = {int(row["round"]): str(row["said"]) for row in of.rows if "said" in row}
    said = [
        *(f"Round {n}: {_FOUND[diagnosis_of(aligned[n]).choice]}." for n in ends(aligned)),
        *(f"Round {n}: {told[n]}." for n in ends(told)),
        *_changes(of.stages),
    ]
    return Section(
        "What happened", text=f"{rounds} rounds reported; {found}.", sentences=said, terms=_WORDS
    )


def _changes(stages: Iterable[Row]) -> list[str]:
    """Return sentences about the guard's comparisons and the change of each score over the run."""
    series = _series(stages)
    aligned, plain = (series.get(f"train/fedrot-guard-{name}", {}) for name in ("aligned", "plain"))
    said = [
        f"Round {n}: the guard measured {aligned[n]:{style}} for the aligned mean and {plain[n]:{style}} "
        "for the plain mean."
        for n in ends(aligned)
        for style in [number_style(aligned[n], plain[n])]
    ]
    for name, values in series.items():
        stage, _, metric = name.partition("/")
        if stage in SCORING and not metric.startswith("fedrot-") and len(values) > 1:
            first, last = ends(values)
            style = number_style(values[first], values[last])
            change = f"{values[first]:{style}} in round {first} → {values[last]:{style}} in round {last}"
            said.append(f"{metric} ({SCORING[stage]}): {change}.")
    return said


@PAGE.section
def removed(of: StrategyResults) -> Section:
    """The heat map of the alignment."""
    aligned = [row for row in of.rows if "before" in row]
    text = "" if aligned else "No aligned replies are reported."
    pictures = alignment_pictures(aligned)
    return Section("What alignment found, by layer and round", text=text, pictures=pictures)


@PAGE.section
def lost(of: StrategyResults) -> Section:
    """Lost replies by client and reason, the most frequent first."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for row in of.rows:
        for what in [key for key in ("dropped", "failed") if key in row]:
            found.setdefault((str(row["client"]), what, str(row[what])), []).append(row["round"])
    if not found:
        return Section("Lost replies", text="None.")
    lines = [
        [client, what, str(len(rounds)), " to ".join(map(str, ends(rounds))), reason]
        for (client, what, reason), rounds in found.items()
    ]
    lines.sort(key=lambda line: (-int(line[2]), int(line[0])))
    header = ("client", "what", "times", "rounds", "reason")
    return Section("Lost replies", tables=[Table("", header, lines, texts=("client", "what", "reason"))])


@PAGE.section
def failed(of: StrategyResults) -> Section | None:
    """Rounds without a new model."""
    rounds = [f"Round {row['round']}: {row['lost']}" for row in of.rows if "lost" in row]
    return Section("Rounds without a new model", sentences=rounds) if rounds else None


@PAGE.section
def metrics(of: StrategyResults) -> Section | None:
    """Curves of the metrics that change, and values of constant metrics."""
    series, rounds = _series(of.stages), {int(row["round"]) for row in of.stages}
    same = {
        name: own for name, own in series.items() if len({*own.values()}) == 1 and own.keys() == rounds
    }
    changing = {name: own for name, own in series.items() if name not in same}
    if not changing:
        return None
    constant = ", ".join(f"{name} = {next(iter(own.values())):g}" for name, own in same.items())
    text = f"The same in all rounds: {constant}." if constant else ""
    alt = "; ".join(
        f"{name}: {own[min(own)]:.3g} to {own[max(own)]:.3g}" for name, own in changing.items()
    )
    drawn = Picture(data_uri(rounds_plot(changing)), alt, "A panel per metric, by round.")
    return Section("Metrics by round", text=text, pictures=[drawn])


def _series(stages: Iterable[Row]) -> dict[str, dict[int, float]]:
    """Return the metrics by name and round; a list becomes one metric per entry."""
    series: dict[str, dict[int, float]] = {}
    for row in stages:
        for name, value in row["metrics"].items():
            full = f"{row['stage']}/{name}"
            several = isinstance(value, list)
            numbers = {f"{full}/{i}": v for i, v in enumerate(value)} if several else {full: value}
            for own, number in numbers.items():
                series.setdefault(own, {})[int(row["round"])] = (
                    math.nan if number is None else float(number)
                )
    return series
