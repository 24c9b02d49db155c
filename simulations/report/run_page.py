"""The page ``report.html`` of a run folder, the run's tables as Markdown, and its results on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrot._io import refuse_links
from fedrot.simulations.folder import Run, read_run
from fedrot.simulations.report import findings, plots
from fedrot.simulations.report.heat_map import caption, heat_map
from fedrot.simulations.report.page import Page, Picture, Section
from fedrot.simulations.report.tables import compact_table, metric_table, partition_table, seeds, spoken
from fedrot.simulations.summary import Row, Verdict, described, experiments_of, verdict

if TYPE_CHECKING:
    from rich.console import Console

#: Function of the rows and the experiments of a run that returns a Markdown table, or an empty text.
MarkdownTable = Callable[[Sequence[Row], Sequence[Mapping[str, Any]]], str]

#: Tables of plug-ins, placed after the results.
MARKDOWN_TABLES: list[MarkdownTable] = []


@dataclass(frozen=True)
class Results:
    """A run, and the verdicts of its experiments that have results."""

    run: Run
    verdicts: Sequence[Verdict]

    @classmethod
    def of(cls, run: Run) -> Results:
        """Judge every experiment of a run."""
        found = (verdict(run, name) for name in experiments_of(run))
        return cls(run, [one for one in found if one is not None])

    def each(self, title: str, show: Callable[[str], Section | None]) -> Section | None:
        """Return a section with a part per experiment, which has its name if there are several."""
        names = experiments_of(self.run)
        shown = {name: own for name in names if (own := show(name)) is not None}
        if len(names) == 1 and shown:
            return replace(shown[names[0]], title=title)
        parts = [replace(own, title=name) for name, own in shown.items()]
        return Section(title, sections=parts) if parts else None

    def verdict_of(self, experiment: str) -> Verdict | None:
        """Return the verdict of an experiment; None without results."""
        return next((found for found in self.verdicts if found.experiment == experiment), None)


def write_report(path: Path) -> Path:
    """Write the ``report.html`` of a run folder, complete or not; return the page's path.

    Raises ``FileNotFoundError`` if there is no folder.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no run folder {path}; check the path")
    refuse_links(path)
    return PAGE.write(path / "report.html", path.resolve().name, Results.of(read_run(path)))


def markdown_report(path: Path) -> str:
    """Return the tables of a run folder as Markdown: results, and tables of plug-ins."""
    run = read_run(path)
    tables = [
        replace(table, title=f"{found.experiment}: {table.title}").markdown()
        for found in Results.of(run).verdicts
        for table in [compact_table(found, "results"), *(metric_table(found, m) for m in found.metrics)]
    ]
    return "\n".join(
        filter(None, [*tables, *(table(run.rows, run.experiments) for table in MARKDOWN_TABLES)])
    )


def print_results(run: Run, console: Console) -> None:
    """Print a line per experiment, then for each the line to copy, sentences and a table."""
    from rich.markup import escape

    verdicts = Results.of(run).verdicts
    for found in verdicts:
        console.print(f"[bold]{escape(found.experiment)}: {escape(findings.lead(found))}[/bold]")
    for found in verdicts:
        console.print()
        if len(verdicts) > 1:
            console.print(f"[bold]{escape(found.experiment)}[/bold]")
        if found.learned:
            console.print(f"  {found.recommended.about.get('code', '')}", markup=False)
        for sentence in findings.sentences(found):
            console.print(f"- {sentence}", markup=False, highlight=False)
        console.print(compact_table(found))


PAGE: Page[Results] = Page()


@PAGE.section
def incomplete(of: Results) -> Section | None:
    """What has no results yet; None for a complete run."""
    text = "What follows is about the finished part. These have no results yet:"
    return (
        Section("This run is incomplete.", text=text, sentences=of.run.missing, warning=True)
        if of.run.missing
        else None
    )


@PAGE.section
def verdicts(of: Results) -> Section | None:
    """The verdict of every experiment, with the line to copy and the differences of all strategies."""
    return of.each("What to use", lambda name: _verdict(of.verdict_of(name)))


def _verdict(found: Verdict | None) -> Section | None:
    if found is None:
        return Section(lead="There are no results yet.")
    pictures = []
    if len(found.standings) > 1:
        table = compact_table(found)
        alt = "; ".join(f"{line[0]}: {', '.join(line[1:])}" for line in table.lines)
        text = f"Difference from {found.reference.name}, with the 95 % interval over {seeds(found.standings)}."
        text += " An interval that crosses the line decides nothing. Beside a name: its mean."
        pictures = [Picture(plots.data_uri(plots.differences_plot(found)), alt, text)]
    code = str(found.recommended.about.get("code", "")) if found.learned else ""
    said = findings.sentences(found)
    return Section("", findings.lead(found), code, "", said, pictures=pictures, beside=True)


@PAGE.section
def strategies(of: Results) -> Section | None:
    """What every strategy does."""
    said = {own.name: own.about.get("says") for found in of.verdicts for own in found.standings}
    said = {name: text for name, text in said.items() if text}
    return Section("The strategies", terms=said) if said else None


@PAGE.section
def clients(of: Results) -> Section | None:
    """The rows of every client and class, of the first seed."""

    def show(name: str) -> Section | None:
        partition = of.run.partitions.get(name, {})
        for seed, own in partition.get("seeds", {}).items():
            text = f"Training rows of each client and class, seed {seed}; held-out rows of clients are among them."
            alt = "; ".join(f"client {n}: {sum(counts)} rows" for n, counts in enumerate(own["counts"]))
            figure = plots.clients_plot(own["counts"], partition.get("label_names", []))
            return Section(pictures=[Picture(plots.data_uri(figure), alt, text)])
        return None

    return of.each("What the clients have", show)


@PAGE.section
def curves(of: Results) -> Section | None:
    """The judged metrics by round."""

    def show(name: str) -> Section | None:
        found = of.verdict_of(name)
        rows = [row for row in of.run.rows if row["experiment"] == name]
        if found is None or max(row["round"] for row in rows) < 2:
            return None
        names = [own.name for own in found.standings]
        pictures = []
        for metric in found.judged:
            ends = ", ".join(f"{own.name} {own.mean(metric):.3g}" for own in found.standings)
            text = f"{described(metric)} of the global model on test rows".replace("_", " ")
            text += f"; shaded: 95 % interval over {seeds(found.standings)}, cut at the frame."
            drawn = plots.data_uri(plots.curves_plot(rows, metric, names))
            pictures.append(Picture(drawn, f"{spoken(metric)} after the last round: {ends}", text))
        return Section(pictures=pictures)

    return of.each("Round by round", show)


@PAGE.section
def alignment(of: Results) -> Section | None:
    """The heat map of every strategy that aligns."""

    def show(name: str) -> Section | None:
        rows = [row for row in of.run.alignment if row["experiment"] == name and "before" in row]
        pictures = alignment_pictures(rows)
        return Section(pictures=pictures) if pictures else None

    return of.each("What alignment found, by layer and round", show)


def alignment_pictures(rows: Sequence[Row]) -> list[Picture]:
    """Return a heat map per strategy of rows of alignment; the caption stands below the last one."""
    by_strategy: dict[str, list[Row]] = {}
    for row in rows:
        by_strategy.setdefault(str(row.get("strategy", "")), []).append(row)
    return [
        Picture(
            plots.data_uri(heat_map(own)),
            f"Heat map {name}: share of the distance that alignment found, by part, layer and round",
            ": ".join(filter(None, [name, caption(own)])),
        )
        for name, own in by_strategy.items()
    ]


@PAGE.section
def tables(of: Results) -> Section | None:
    """All strategies after the last round; every metric is folded."""

    def show(name: str) -> Section | None:
        found = of.verdict_of(name)
        if found is None:
            return None
        every = [metric_table(found, metric) for metric in found.metrics]
        return Section(
            tables=[compact_table(found)], sections=[Section("Every metric", tables=every, folded=True)]
        )

    return of.each("Results in numbers", show)


@PAGE.section
def hurt(of: Results) -> Section | None:
    """Dropped replies, failed clients, and layers in which alignment had no effect."""

    def show(name: str) -> Section | None:
        rows, aligned = (
            [row for row in own if row["experiment"] == name] for own in (of.run.rows, of.run.alignment)
        )
        lost, idle = findings.lost_replies(rows, aligned), findings.idle_layers(aligned)
        folded = [Section("Layers without effect", sentences=idle, folded=True)] if idle else []
        return Section(sentences=lost, sections=folded) if lost or idle else None

    return of.each("What changed nothing, and lost replies", show)


@PAGE.section
def repeat(of: Results) -> Section | None:
    """Partitions, configurations, versions and the commands."""
    run = of.run
    below = [
        Section(f"Configuration of {own['name']}", terms=_in_use(own), folded=True)
        for own in run.experiments
    ]
    for name, own in run.partitions.items():
        shown = [
            partition_table(seed["counts"], own.get("label_names", []), f"Seed {number}")
            for number, seed in own.get("seeds", {}).items()
        ]
        below.append(Section(f"Rows of the clients, {name}", tables=shown, folded=True))
    if run.versions:
        below.append(Section("Versions", terms=run.versions, folded=True))
    text = "" if run.commands else "The command was not recorded."
    return Section("To repeat", code="\n".join(run.commands), text=text, sections=below)


def _in_use(experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that are not empty; strategies by their names."""
    names = ", ".join(str(own["name"]) for own in experiment.get("strategies", ()))
    return {k: v for k, v in {**experiment, "strategies": names}.items() if v not in (None, "")}
