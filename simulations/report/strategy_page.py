"""The HTML page of a strategy's rows file, and its sections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedrot.diagnosis import ALIGNED, PLAIN, WHOLE, diagnosis_of
from fedrot.simulations.folder import read_rows
from fedrot.simulations.report.heat_map import CAPTION, heat_maps
from fedrot.simulations.report.page import Page, Picture, Section
from fedrot.simulations.report.plots import data_uri, rounds_plot
from fedrot.simulations.report.tables import lost_table, number
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


#: The page of the rows of a strategy: about replies, and, with a ``stage``, metrics.
PAGE: Page[Sequence[Row]] = Page()


def write_strategy_report(file: Path, out: Path | None = None) -> Path:
    """Write the page of the rows of ``FedRot`` or ``Aligned``; return the page's path.

    Args:
        file: JSON lines that the strategy wrote, ``Reporting(rows=...)``.
        out: the page; None: the path of ``file`` with the suffix ``.html``.

    Raises:
        ValueError: the file was not written by a strategy.
        OSError: the file cannot be read, or the page cannot be written.
    """
    rows = read_rows(file)
    if not rows or not all(map(_is_row, rows)):
        raise ValueError(f"'{file}' is no file of Reporting(rows=...): JSON lines, each with 'round'.")
    return PAGE.write(out or file.with_suffix(".html"), file.stem, rows)


def _is_row(row: Row) -> bool:
    """Return whether a row has the fields of a strategy's rows."""
    whole = "before" not in row or {"after", "found", "moved", "part", "layer", "client"} <= row.keys()
    return "round" in row and ("metrics" in row) == ("stage" in row) and whole


@PAGE.section
def verdict(rows: Sequence[Row]) -> Section:
    """Results of alignment in the first and the last round, and changes of the scores."""
    aligned: dict[int, list[Row]] = {}
    for row in rows:
        if "before" in row:
            aligned.setdefault(int(row["round"]), []).append(row)
    moved = sum(any(row["moved"] for row in own) for own in aligned.values())
    found = f"alignment moved groups in {moved} of {len(aligned)}" if aligned else "none was aligned"
    told = {int(row["round"]): str(row["said"]) for row in rows if "said" in row}
    said = [
        *(f"Round {n}: {_FOUND[diagnosis_of(aligned[n]).choice]}." for n in ends(aligned)),
        *(f"Round {n}: {told[n]}." for n in ends(told)),
        *_changes(_series(rows)),
    ]
    text = f"{len({row['round'] for row in rows})} rounds reported; {found}."
    return Section("What happened", text=text, sentences=said, terms=_WORDS)


def _changes(series: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Return sentences about the guard's comparisons and the change of each score over the run."""
    aligned, plain = (series.get(f"train/fedrot-guard-{name}", {}) for name in ("aligned", "plain"))
    guarded = "Round {}: the guard measured {} for the aligned mean and {} for the plain mean."
    said = [guarded.format(n, number(aligned[n]), number(plain[n])) for n in ends(aligned)]
    for name, values in series.items():
        stage, _, metric = name.partition("/")
        if stage in SCORING and not metric.startswith("fedrot-") and len(values) > 1:
            change = " → ".join(f"{number(values[n])} in round {n}" for n in ends(values))
            said.append(f"{metric} ({SCORING[stage]}): {change}.")
    return said


@PAGE.section
def removed(rows: Sequence[Row]) -> Section:
    """The heat map of the alignment."""
    grids = heat_maps(row for row in rows if "before" in row)
    text = CAPTION if grids else "No aligned replies are reported."
    return Section("What alignment found, by layer and round", text=text, grids=grids)


@PAGE.section
def lost(rows: Sequence[Row]) -> Section:
    """Lost replies by client and reason, the most frequent first."""
    tables = lost_table(rows)
    return Section("Lost replies", text="" if tables else "None.", tables=tables)


@PAGE.section
def failed(rows: Sequence[Row]) -> Section | None:
    """Rounds without a new model."""
    rounds = [f"Round {row['round']}: {row['lost']}" for row in rows if "lost" in row]
    return Section("Rounds without a new model", sentences=rounds) if rounds else None


@PAGE.section
def metrics(rows: Sequence[Row]) -> Section | None:
    """Curves of the metrics that change, and values of constant metrics."""
    series, rounds = _series(rows), {int(row["round"]) for row in rows if "stage" in row}
    constant = [n for n, own in series.items() if len({*own.values()}) == 1 and own.keys() == rounds]
    changing = {name: own for name, own in series.items() if name not in constant}
    if not changing:
        return None
    same = ", ".join(f"{name} = {series[name][min(rounds)]:g}" for name in constant)
    alt = "; ".join(
        f"{name}: {own[min(own)]:.3g} to {own[max(own)]:.3g}" for name, own in changing.items()
    )
    drawn = Picture(data_uri(rounds_plot(changing)), alt, "A panel per metric, by round.")
    text = f"The same in all rounds: {same}." if same else ""
    return Section("Metrics by round", text=text, pictures=[drawn])


def _series(rows: Iterable[Row]) -> dict[str, dict[int, float]]:
    """Return the metrics by name and round; a list becomes one metric per entry, null NaN."""
    series: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.get("metrics", {}).items():
            several = isinstance(value, list)
            for place, one in enumerate(value if several else [value]):
                full = f"{row['stage']}/{name}" + (f"/{place}" if several else "")
                series.setdefault(full, {})[int(row["round"])] = math.nan if one is None else float(one)
    return series
