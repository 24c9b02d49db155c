"""The HTML page of a strategy's rows file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from fedrot.diagnosis import ALIGNED, PLAIN, WHOLE, diagnosis_of
from fedrot.simulations.folder import read_rows
from fedrot.simulations.report.page import write_page
from fedrot.simulations.summary import Row
from fedrot.strategies.reporting.verdict import ends

#: Results of a round's diagnosis, in words.
_FOUND = {
    PLAIN: "alignment found nothing beyond chance",
    ALIGNED: "the clients are in different coordinates",
    WHOLE: "replies were in another basis, and were matched as whole models",
}


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
    aligned: dict[int, list[Row]] = {}
    for row in rows:
        if "before" in row:
            aligned.setdefault(row["round"], []).append(row)
    told = {row["round"]: str(row["said"]) for row in rows if "said" in row}
    series, rounds = _series(rows), {row["round"] for row in rows if "stage" in row}
    constant = [n for n, own in series.items() if len({*own.values()}) == 1 and own.keys() == rounds]
    return write_page(
        out or file.with_suffix(".html"),
        "strategy.html.j2",
        name=file.stem,
        rows=rows,
        aligned=aligned,
        moved=sum(any(row["moved"] for row in own) for own in aligned.values()),
        said=[f"Round {n}: {_FOUND[diagnosis_of(aligned[n]).choice]}." for n in ends(aligned)]
        + [f"Round {n}: {told[n]}." for n in ends(told)],
        constant={name: series.pop(name)[min(rounds)] for name in constant},
        series={name: sorted(own.items()) for name, own in series.items()},
    )


def _is_row(row: Row) -> bool:
    """Return whether a row has the fields of a strategy's rows."""
    whole = "before" not in row or {"after", "found", "moved", "part", "layer", "client"} <= row.keys()
    return "round" in row and ("metrics" in row) == ("stage" in row) and whole


def _series(rows: Iterable[Row]) -> dict[str, dict[int, float]]:
    """Return the metrics by name and round; a list becomes one metric per entry, null NaN."""
    series: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.get("metrics", {}).items():
            several = isinstance(value, list)
            for place, one in enumerate(value if several else [value]):
                full = f"{row['stage']}/{name}" + (f"/{place}" if several else "")
                series.setdefault(full, {})[row["round"]] = math.nan if one is None else float(one)
    return series
