"""Pages of run folders and of a strategy's rows; results on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from fedrot._io import write_text
from fedrot.alignment.diagnosis import ALIGNED, PLAIN, WHOLE, diagnosis_of
from fedrot.simulations.comparison import paired
from fedrot.simulations.comparison.summary import verdicts_of
from fedrot.simulations.report import findings, plots, tables
from fedrot.simulations.report.site_rows import SiteRow
from fedrot.simulations.run_folder import OF_GROUP, Row, read_rows, read_run
from fedrot.strategies.reporting.rows import scalars
from fedrot.strategies.reporting.verdict import ends

#: Results of a round's diagnosis, in words.
_FOUND = {
    PLAIN: "alignment found nothing beyond chance",
    ALIGNED: "the clients are in different coordinates",
    WHOLE: "replies were in another basis, and were matched as whole models",
}
#: Fields of a row about a group of weights.
_OF_GROUP = {*OF_GROUP, "client"}


def present(path: Path, console: Console) -> Path:
    """Print the results of a run folder, complete or not, and write its page.

    Printed are a line per experiment, and for each the line to copy, sentences and a
    table. Returns the page's path. Raises the errors of ``read_run``.
    """
    run = read_run(path)
    verdicts = verdicts_of(run)
    for verdict in verdicts:
        console.print(
            f"{verdict.experiment}: {findings.lead(verdict)}",
            style="bold",
            markup=False,
        )
    for verdict in verdicts:
        lines = ["", verdict.experiment] if len(verdicts) > 1 else [""]
        if verdict.code:
            lines.append(f"  {verdict.code}")
        lines += [f"- {sentence}" for sentence in findings.sentences(verdict)]
        console.print("\n".join(lines), markup=False)
        console.print(tables.results_table(verdict, verdict.judged))
        if verdict.sites:
            console.print(tables.sites_table(verdict.sites))
    page = write_page(
        path / "report.html",
        "run.html.j2",
        name=path.resolve().name,
        run=run,
        verdicts=verdicts,
    )
    console.print(f"Report: {page}")
    return page


def write_strategy_report(file: Path) -> Path:
    """Write the page of rows of ``Reporting(rows=...)`` beside their file.

    Returns the page's path.

    Raises:
        ValueError: the file was not written by a strategy.
        OSError: the file cannot be read, or the page cannot be written.
    """
    rows = read_rows(file)
    if not rows or not all(map(_is_of_strategy, rows)):
        raise ValueError(
            f"'{file}' is no file of Reporting(rows=...): JSON lines, each with "
            "'round'."
        )
    page = file.with_suffix(".html")
    if page.exists() and "<title>fedrot: " not in page.read_text("utf-8", "replace"):
        raise FileExistsError(
            f"'{page}' is no page of fedrot, and the report would replace it. Rename "
            "it."
        )
    try:
        sites = [SiteRow(**row) for row in rows if row.get("stage") == "site"]
    except ValueError as error:
        raise ValueError(
            f"'{file}' has a site's row that is damaged: {error}"
        ) from error
    aligned: dict[int, list[Row]] = {}
    for row in rows:
        if "before" in row:
            aligned.setdefault(row["round"], []).append(row)
    verdicts = {row["round"]: row["said"] for row in rows if "said" in row}
    diagnoses = {
        round_: _FOUND[diagnosis_of(aligned[round_]).choice] for round_ in ends(aligned)
    }
    sentences = [
        f"Round {round_}: {texts[round_]}."
        for texts in (diagnoses, verdicts)
        for round_ in ends(texts)
    ]
    return write_page(
        page,
        "strategy.html.j2",
        name=file.stem,
        rows=rows,
        aligned=aligned,
        sentences=sentences,
        series=_series(rows),
        sites=sites,
    )


def _is_of_strategy(row: Row) -> bool:
    """Return whether a row has the fields that the page reads."""
    return (
        "round" in row
        and ("metrics" in row) == (row.get("stage", "site") != "site")
        and ("before" not in row or row.keys() >= _OF_GROUP)
    )


def _series(rows: Iterable[Row]) -> plots.Series:
    """Return rounds and values of the metrics by name.

    What sites report has a table.
    """
    series: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get("stage") == "sites":
            continue
        for metric, value in scalars(row.get("metrics", {})):
            values = series.setdefault(f"{row['stage']}/{metric}", {})
            values[row["round"]] = value
    return {name: sorted(by_round.items()) for name, by_round in series.items()}


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
    page = environment.get_template(
        template,
        globals={
            "findings": findings,
            "plots": plots,
            "paired": paired,
            "tables": tables,
        },
    )
    write_text(path, page.render(values))
    return path
