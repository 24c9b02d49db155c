"""The page ``report.html`` of a run folder, and its results on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedrot.simulations.folder import Run, read_run
from fedrot.simulations.report import findings
from fedrot.simulations.report.page import Section, write_page
from fedrot.simulations.report.tables import results_table
from fedrot.simulations.summary import verdicts_of

if TYPE_CHECKING:
    from rich.console import Console

#: Sections of plug-ins at the end of the page: functions of a run, None leaves the section out.
SECTIONS: list[Callable[[Run], Section | None]] = []


def write_report(path: Path) -> Path:
    """Write the ``report.html`` of a run folder, complete or not; return the page's path.

    Raises the errors of ``read_run``.
    """
    run = read_run(path)
    verdicts = verdicts_of(run)
    strategies = [own for found in verdicts for own in found.standings]
    return write_page(
        path / "report.html",
        "run.html.j2",
        name=path.resolve().name,
        run=run,
        verdicts=verdicts,
        says={own.name: own.about["says"] for own in strategies if own.about.get("says")},
        more=[section for show in SECTIONS if (section := show(run)) is not None],
    )


def print_results(run: Run, console: Console) -> None:
    """Print a line per experiment, then for each the line to copy, sentences and a table."""
    verdicts = verdicts_of(run)
    for found in verdicts:
        console.print(f"{found.experiment}: {findings.lead(found)}", style="bold", markup=False)
    for found in verdicts:
        title = found.experiment if len(verdicts) > 1 else ""
        said = [f"- {sentence}" for sentence in findings.sentences(found)]
        text = "\n".join(filter(None, [title, f"  {found.code}" if found.code else "", *said]))
        console.print(f"\n{text}", markup=False, highlight=False)
        console.print(results_table(found, found.judged))
