"""Pages of run folders and of a strategy's rows, from templates; and results on a
terminal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from fedrot._io import write_text
from fedrot.alignment.diagnosis import ALIGNED, PLAIN, WHOLE, diagnosis_of
from fedrot.simulations.report import findings, plots, tables
from fedrot.simulations.run_folder import read_rows, read_run
from fedrot.simulations.summary import LOWER_IS_BETTER, Row, verdicts_of
from fedrot.strategies.reporting.verdict import ends

#: Results of a round's diagnosis, in words.
_FOUND = {
    PLAIN: "alignment found nothing beyond chance",
    ALIGNED: "the clients are in different coordinates",
    WHOLE: "replies were in another basis, and were matched as whole models",
}


def present(path: Path, console: Console) -> Path:
    """Print the results of a run folder, complete or not, and write its page; return
    the page's path.

    Printed are a line per experiment, and for each the line to copy, sentences and a
    table. Raises the errors of ``read_run``.
    """
    run = read_run(path)
    verdicts = verdicts_of(run)
    for found in verdicts:
        console.print(
            f"{found.experiment}: {findings.lead(found)}", style="bold", markup=False
        )
    for found in verdicts:
        title = found.experiment if len(verdicts) > 1 else ""
        said = [f"- {sentence}" for sentence in findings.sentences(found)]
        text = "\n".join(
            filter(None, [title, f"  {found.code}" if found.code else "", *said])
        )
        console.print(f"\n{text}", markup=False, highlight=False)
        console.print(tables.results_table(found, found.judged))
    strategies = [own for found in verdicts for own in found.standings]
    page = write_page(
        path / "report.html",
        "run.html.j2",
        name=path.resolve().name,
        run=run,
        verdicts=verdicts,
        says={
            own.name: own.about["says"] for own in strategies if own.about.get("says")
        },
    )
    console.print(f"Report: {page}", highlight=False)
    return page


def write_strategy_report(file: Path) -> Path:
    """Write the page of rows of ``Reporting(rows=...)`` beside their file; return the
    page's path.

    Raises:
        ValueError: the file was not written by a strategy.
        OSError: the file cannot be read, or the page cannot be written.
    """
    rows, moved = (
        read_rows(file),
        {"after", "found", "moved", "part", "layer", "client"},
    )
    right = (
        "round" in row
        and ("metrics" in row) == ("stage" in row)
        and ("before" not in row or moved <= row.keys())
        for row in rows
    )
    if not rows or not all(right):
        raise ValueError(
            f"'{file}' is no file of Reporting(rows=...): JSON lines, each with "
            "'round'."
        )
    aligned: dict[int, list[Row]] = {}
    for row in rows:
        if "before" in row:
            aligned.setdefault(row["round"], []).append(row)
    told = {row["round"]: str(row["said"]) for row in rows if "said" in row}
    return write_page(
        file.with_suffix(".html"),
        "strategy.html.j2",
        name=file.stem,
        rows=rows,
        aligned=aligned,
        moved=sum(any(row["moved"] for row in own) for own in aligned.values()),
        said=[
            f"Round {n}: {_FOUND[diagnosis_of(aligned[n]).choice]}."
            for n in ends(aligned)
        ]
        + [f"Round {n}: {told[n]}." for n in ends(told)],
        series={name: sorted(own.items()) for name, own in _series(rows).items()},
    )


def _series(rows: Iterable[Row]) -> dict[str, dict[int, float]]:
    """Return the metrics by name and round; a list becomes one metric per entry, null
    NaN.
    """
    series: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.get("metrics", {}).items():
            several = isinstance(value, list)
            for place, one in enumerate(value if several else [value]):
                full = f"{row['stage']}/{name}" + (f"/{place}" if several else "")
                series.setdefault(full, {})[row["round"]] = (
                    math.nan if one is None else float(one)
                )
    return series


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Render a template into a file, which is replaced at once; return its path."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedrot.simulations.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"number": tables.number, "spoken": tables.spoken}
    environment.globals |= {"findings": findings, "plots": plots, "tables": tables}
    environment.globals["lower_is_better"] = LOWER_IS_BETTER
    write_text(path, environment.get_template(template).render(values))
    return path
