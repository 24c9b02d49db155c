"""The HTML page of a strategy's report files, and its sections."""

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
from fedrot.simulations.report.findings.shares import share_table
from fedrot.simulations.report.html_page import HtmlPage, Values, data_uri
from fedrot.simulations.report.plots import rounds_plot
from fedrot.simulations.report.summaries import Row
from fedrot.simulations.report.tables import number_style
from fedrot.strategies.reporting.verdict import ends

#: The stages of a round that score its model, in words.
SCORING = {"server": "at the server", "evaluate": "at the clients"}


@dataclass(frozen=True)
class StrategyResults:
    """Rows of a strategy's report, and of its metrics by round and stage."""

    rows: Sequence[Row]
    stages: Sequence[Row]


def write_strategy_report(report: Path, out: Path | None = None) -> Path:
    """Write the page of the rows of ``FedRot`` or ``Aligned``; returns the page's path.

    Args:
        report: JSON lines that the strategy wrote, ``Reporting(rows=...)``.
        out: the page; beside the report, with its name and ``.html``, if None.

    Raises:
        ValueError: a strategy does not write such a file.
        OSError: the file cannot be read, or the page not be written.
    """
    every = read_rows(report.parent, report.name)
    if not every or not all("round" in row and ("metrics" in row) == ("stage" in row) for row in every):
        raise ValueError(f"'{report}' is not what a strategy writes: JSON lines with 'round' in each.")
    stages = [row for row in every if "stage" in row]
    results = StrategyResults([row for row in every if "stage" not in row], stages)
    return PAGE.write(out or report.with_suffix(".html"), report.stem, results)


PAGE: HtmlPage[StrategyResults] = HtmlPage()

#: What a round's evidence asks for, in words.
_FOUND = {
    PLAIN: "alignment found nothing beyond chance",
    ALIGNED: "clients had turned against each other",
    WHOLE: "replies came from another basis, and were matched as whole models",
}
_WORDS = {
    "turned": "two clients hold the same head in coordinates that differ by a rotation",
    "chance": "what the best rotation removes from noise alone",
    "moved": "a group of weights was brought into the anchor's coordinates before it was averaged",
}


@PAGE.section
def verdict(of: StrategyResults) -> Values:
    """What alignment found at the ends of the run, and how the scores changed."""
    aligned: dict[int, list[Row]] = {}
    for row in of.rows:
        if "before" in row:
            aligned.setdefault(int(row["round"]), []).append(row)
    said = []
    if aligned:
        moved = sum(any(row.get("moved") for row in rows) for rows in aligned.values())
        said.append(f"Alignment moved groups in {moved} of {len(aligned)} rounds.")
    # Older files lack what was found.
    if all({"found", "moved"} <= row.keys() for rows in aligned.values() for row in rows):
        said += [f"Round {n}: {_FOUND[diagnosis_of(aligned[n]).choice]}." for n in ends(aligned)]
    told = {int(row["round"]): str(row["said"]) for row in of.rows if "said" in row}
    said += [f"Round {n}: {told[n]}." for n in ends(told)]
    rounds = len({row["round"] for row in of.rows})
    about, title = f"{rounds} rounds reported.", "What happened"
    return {"about": about, "title": title, "sentences": [*said, *_changes(of.stages)], "words": _WORDS}


def _guarded(aligned: Mapping[int, float], plain: Mapping[int, float]) -> list[str]:
    """Return what the guard measured of both means, in the first and the last round that it compared."""
    return [
        f"Round {n}: the guard measured {aligned[n]:{style}} of the aligned mean and "
        f"{plain[n]:{style}} of the plain one."
        for n in ends(aligned)
        for style in [number_style(aligned[n], plain[n])]
    ]


def _changes(stages: Iterable[Row]) -> list[str]:
    """Return how each score changed over the run, and what the guard measured."""
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
def removed(of: StrategyResults) -> Values:
    """The heat map of the alignment."""
    aligned = [row for row in of.rows if "before" in row]
    drawn = aligned and _drawn(heat_map.alignment_plot, aligned)
    return {"heat_map": drawn, "caption": heat_map.caption(aligned)}


@PAGE.section
def shares(of: StrategyResults) -> Values | None:
    """Shares found by part, beside chance; left out if no row knows what chance removes."""
    table = share_table(of.rows)
    return {"table": table} if table is not None else None


@PAGE.section
def lost(of: StrategyResults) -> Values:
    """Lost replies by client and reason, the most frequent first."""
    found: dict[tuple[int, str, str], list[int]] = {}
    for row in of.rows:
        for what in [key for key in ("dropped", "failed") if key in row]:
            found.setdefault((row["client"], what, row[what]), []).append(row["round"])
    lines = [
        {"client": client, "what": what, "reason": reason, "rounds": sorted(rounds)}
        for (client, what, reason), rounds in found.items()
    ]
    return {"lost": sorted(lines, key=lambda line: (-len(line["rounds"]), line["client"]))}


@PAGE.section
def failed(of: StrategyResults) -> Values | None:
    """Rounds that gave no model."""
    rounds = [(row["round"], row["lost"]) for row in of.rows if "lost" in row]
    return {"failed": rounds} if rounds else None


@PAGE.section
def metrics(of: StrategyResults) -> Values | None:
    """Curves of the metrics that change, values of those that never do."""
    series = _series(of.stages)
    rounds = {int(row["round"]) for row in of.stages}
    alike = {
        name: s for name, s in series.items() if len(set(s.values())) == 1 and len(s) == len(rounds)
    }
    same = {name: next(iter(s.values())) for name, s in alike.items()}
    changing = {name: s for name, s in series.items() if name not in same}
    constant = [f"{name} = {value:g}" for name, value in same.items()]
    return {"metrics": _drawn(rounds_plot, changing), "constant": constant} if changing else None


def _series(stages: Iterable[Row]) -> dict[str, dict[int, float]]:
    """Return the metrics by name and round; a list becomes a metric per entry."""
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
