"""The page ``report.html`` of a run folder, and its results on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedrot._io import refuse_links
from fedrot.simulations.folder import Run, read_run
from fedrot.simulations.report import findings, plots
from fedrot.simulations.report.heat_map import CAPTION, heat_maps
from fedrot.simulations.report.page import Cell, Grid, Page, Picture, Section
from fedrot.simulations.report.tables import compact_table, lost_table, metric_table, seeds, spoken
from fedrot.simulations.summary import Verdict, described, verdicts_of

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Results:
    """A run, and the verdicts of its experiments that have results."""

    run: Run
    verdicts: Sequence[Verdict]


#: The page of a run. Sections that plug-ins register come last.
PAGE: Page[Results] = Page()
#: A section about one experiment: its verdict, and the run with the rows of this experiment only.
OfExperiment = Callable[[Verdict, Run], Section | None]


def each(title: str, text: str = "") -> Callable[[OfExperiment], OfExperiment]:
    """Register a section with a part per experiment, which has its name if there are several."""

    def register(show: OfExperiment) -> OfExperiment:
        def section(of: Results) -> Section | None:
            parts = []
            for found in of.verdicts:
                rows, aligned = (
                    [row for row in own if row["experiment"] == found.experiment]
                    for own in (of.run.rows, of.run.alignment)
                )
                part = show(found, replace(of.run, rows=rows, alignment=aligned))
                parts += [replace(part, title=found.experiment)] if part else []
            if len(of.verdicts) == len(parts) == 1:
                return replace(parts[0], title=title, text=text)
            return Section(title, text=text, sections=parts) if parts else None

        section.__name__ = show.__name__
        PAGE.section(section)
        return show

    return register


def write_report(path: Path) -> Path:
    """Write the ``report.html`` of a run folder, complete or not; return the page's path.

    Raises ``FileNotFoundError`` if there is no folder.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no run folder {path}; check the path")
    refuse_links(path)
    run = read_run(path)
    return PAGE.write(path / "report.html", path.resolve().name, Results(run, verdicts_of(run)))


def print_results(run: Run, console: Console) -> None:
    """Print the verdict of each experiment, the line to copy, sentences and a table."""
    for found in verdicts_of(run):
        lead = f"\n{found.experiment}: {findings.lead(found)}"
        console.print(lead, style="bold", markup=False, highlight=False)
        said = [f"  {code}"] if (code := _code(found)) else []
        said += [f"- {sentence}" for sentence in findings.sentences(found)]
        console.print("\n".join(said), markup=False, highlight=False)
        console.print(compact_table(found))


def _code(found: Verdict) -> str:
    return str(found.recommended.about.get("code", "")) if found.learned else ""


@PAGE.section
def incomplete(of: Results) -> Section | None:
    """What has no results yet; None for a complete run."""
    text = "What follows is about the finished part." if of.verdicts else "There are no results yet."
    sentences = [f"No results yet: {title}" for title in of.run.missing]
    missing = sentences or not of.verdicts
    return Section("Incomplete", text=text, sentences=sentences, warning=True) if missing else None


@each(
    "What to use",
    "Differences are paired by seed, with 95 % intervals. One that crosses the line decides nothing. Of "
    "40 strategies that change nothing, one looks better by luck.",
)
def verdict(found: Verdict, run: Run) -> Section:
    """The verdict, with the line to copy and the differences of all strategies."""
    table = compact_table(found)
    alt = "; ".join(f"{line[0]}: {', '.join(line[1:])}" for line in table.lines)
    caption = f"Beside each name: its mean over {seeds(found.standings)}."
    drawn = [Picture(plots.data_uri(plots.differences_plot(found)), alt, caption)]
    pictures = drawn if len(found.standings) > 1 else []
    said, code = findings.sentences(found), _code(found)
    return Section("", findings.lead(found), code, sentences=said, pictures=pictures, beside=True)


@PAGE.section
def strategies(of: Results) -> Section | None:
    """What every strategy does."""
    every = [own for found in of.verdicts for own in found.standings]
    said = {own.name: own.about["says"] for own in every if own.about.get("says")}
    return Section("The strategies", terms=said) if said else None


@each("What the clients have", "Rows of each class (line) and client (column), also those held out.")
def clients(found: Verdict, run: Run) -> Section | None:
    """The rows of every client and class; seeds after the first are folded."""
    partition, grids = run.partitions.get(found.experiment, {}), []
    names = partition.get("label_names", [])
    for seed, own in partition.get("seeds", {}).items():
        counts, columns = own["counts"], [f"{n} ({sum(c)})" for n, c in enumerate(own["counts"])]
        most = max(1, *map(max, counts))
        lines = {
            names[place] if place < len(names) else "no class" if names else "rows": [
                Cell(str(client[place]), client[place] / most) for client in counts
            ]
            for place in range(len(counts[0]))
        }
        grids.append(Grid(f"Seed {seed}", "client (its rows)", columns, lines))
    others = [Section("Other seeds", grids=grids[1:], folded=True)] if grids[1:] else []
    return Section(grids=grids[:1], sections=others) if grids else None


@each(
    "Round by round",
    "The global model on the test rows: mean over seeds; shaded: its 95 % interval, cut at the frame.",
)
def curves(found: Verdict, run: Run) -> Section | None:
    """The judged metrics by round."""
    if max(row["round"] for row in run.rows) < 2:
        return None
    pictures = []
    for metric in found.judged:
        ends = (f"{own.name} {own.mean(metric):.3g}" for own in found.standings)
        names = [own.name for own in found.standings]
        drawn = plots.data_uri(plots.curves_plot(run.rows, metric, names))
        alt = f"{spoken(metric)} after the last round: {', '.join(ends)}"
        caption = f"{described(metric)}, {seeds(found.standings)}"
        pictures.append(Picture(drawn, alt, spoken(caption)))
    return Section(pictures=pictures)


@each("What alignment found, by layer and round", CAPTION)
def alignment(found: Verdict, run: Run) -> Section | None:
    """The heat map of every strategy that aligns."""
    grids = heat_maps(row for row in run.alignment if "before" in row)
    return Section(grids=grids) if grids else None


@each("Results in numbers", "After the last round, means over seeds.")
def tables(found: Verdict, run: Run) -> Section:
    """All strategies after the last round; every metric is folded."""
    every = [metric_table(found, metric) for metric in found.metrics]
    folded = Section("Every metric", tables=every, folded=True)
    return Section(tables=[compact_table(found)], sections=[folded])


@each("Lost replies")
def lost(found: Verdict, run: Run) -> Section | None:
    """Dropped replies and failed clients."""
    tables = lost_table(run.alignment)
    return Section(tables=tables) if tables else None


@PAGE.section
def repeat(of: Results) -> Section | None:
    """The commands, configurations and versions."""
    below = []
    for own in of.run.experiments:
        names = ", ".join(str(strategy["name"]) for strategy in own.get("strategies", ()))
        used = {k: v for k, v in {**own, "strategies": names}.items() if v not in (None, "")}
        below.append(Section(f"Configuration of {own.get('name', 'this run')}", terms=used, folded=True))
    below.append(Section("Versions", terms=of.run.versions, folded=True))
    text = "" if of.run.commands else "The command was not recorded."
    return Section("To repeat", code="\n".join(of.run.commands), text=text, sections=below)
