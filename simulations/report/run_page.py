"""The page ``report.html`` of a run folder, complete or not, and the run's tables as Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from fedrot._io import read_json, refuse_links
from fedrot.errors import FedrotError
from fedrot.simulations.config import OF_PRETRAINING, OF_SMALL_MODEL
from fedrot.simulations.federation.run_folder import CENTRAL, ROWS, read_alignment, read_results
from fedrot.simulations.report import heat_map, plots
from fedrot.simulations.report.findings import sentences
from fedrot.simulations.report.html_page import HtmlPage, Section, data_uri
from fedrot.simulations.report.summaries import (
    BASELINE,
    Result,
    Row,
    by_setting,
    described,
    headline,
    metrics_in,
    results,
    setting_of,
)
from fedrot.simulations.report.tables import partition_table, result_tables


class _Setting(BaseModel):
    setting: str
    starts: list[str]
    arms: list[str]
    seeds: list[int]
    rounds: int
    data: str = ""
    model: str | None = None


class _Config(BaseModel):
    command: str | None = None
    settings: list[_Setting] = []


class _Seed(BaseModel):
    counts: list[list[int]]


class _Partition(BaseModel):
    label_names: list[str] = []
    seeds: dict[str, _Seed] = {}


#: The JSON files of a run folder, with the types of the fields that the page uses.
OBJECTS: Mapping[str, TypeAdapter[Any]] = {
    "config.json": TypeAdapter(_Config),
    "versions.json": TypeAdapter(dict[str, str]),
    "partition.json": TypeAdapter(dict[str, _Partition]),
    "status.json": TypeAdapter(dict[str, bool]),
}


@dataclass(frozen=True)
class RunResults:
    """The contents of a run folder: rows, JSON files by name (empty if unreadable), and results."""

    folder: Path
    rows: Sequence[Row]
    alignment: Sequence[Row]
    objects: dict[str, dict[str, Any]]
    results: Sequence[Result]

    @property
    def settings(self) -> Sequence[Mapping[str, Any]]:
        """The configurations of the settings."""
        return self.objects["config.json"].get("settings", [])


def write_report(run_dir: Path) -> Path:
    """Draw the plots of a run folder and write its ``report.html``; return the page's path.

    Missing files and unfinished lines are left out, and the page lists reasons why the run is
    incomplete. The page embeds its plots. Raises ``FileNotFoundError`` if there is no folder.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"there is no run folder {run_dir}; check the path")
    refuse_links(run_dir)
    rows = read_results(run_dir) if (run_dir / ROWS).is_file() else []
    alignment = read_alignment(run_dir)
    objects = {name: _object(run_dir / name) for name in OBJECTS}
    run = RunResults(run_dir, rows, alignment, objects, results(rows))
    return PAGE.write(run_dir / "report.html", run_dir.resolve().name, run)


#: Function of the rows and the settings of a run that returns a Markdown table, or an empty text.
MarkdownTable = Callable[[Sequence[Row], Sequence[Mapping[str, Any]]], str]

#: Tables of plug-ins, placed after the results.
MARKDOWN_TABLES: list[MarkdownTable] = []


def markdown_report(run_dir: Path) -> str:
    """Return the tables of a run folder as Markdown: results, and tables of plug-ins."""
    rows, settings = read_results(run_dir), _object(run_dir / "config.json").get("settings", [])
    tables = [
        *(table.markdown() for table in result_tables(rows)),
        *(table(rows, settings) for table in MARKDOWN_TABLES),
    ]
    return "\n".join(filter(None, tables))


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if it is missing, unreadable or of wrong types."""
    try:
        found = read_json(path)
        OBJECTS[path.name].validate_python(found)
    except (OSError, FedrotError, ValidationError):
        return {}
    return found


PAGE: HtmlPage[RunResults] = HtmlPage()


@PAGE.section
def verdict(run: RunResults) -> Section | None:
    """Date, data and models, sentences about the effect of alignment, and explanations of words."""
    if not run.rows:
        return None
    date = run.objects["versions.json"].get("date", "")
    about = [date, *(f"{name}: {', '.join(found)}" for name, found in _described(run.settings).items())]
    used = {str(row[key]) for row in run.rows for key in ("start", "arm")}
    words = {word: meaning for word, meaning in sentences.WORDS.items() if word in used}
    text = " · ".join(filter(None, about))
    said = sentences.verdicts(run.rows)
    return Section("What helped?" if said else "What was run", text, said, words)


@PAGE.section
def incomplete(run: RunResults) -> Section | None:
    """Reasons why the run is incomplete; None for a complete run."""
    files = {**{name: run.objects[name] for name in OBJECTS if name != "status.json"}, ROWS: run.rows}
    reasons = [f"{name} is missing or unreadable" for name, found in files.items() if not found]
    complete = run.objects["status.json"].get("complete")
    if not complete:
        reasons.append("the run has not finished: it was interrupted, it failed, or it is still running")
    done = {
        (setting_of(row), row["start"], row["arm"], row["seed"], row["round"])
        for row in run.rows
        if row["scope"] == CENTRAL
    }
    for setting in run.settings:
        cells = [
            (setting["setting"], start, arm, seed, setting["rounds"])
            for start in setting["starts"]
            for arm in setting["arms"]
            for seed in setting["seeds"]
        ]
        missing = [cell for cell in cells if cell not in done]
        if missing:
            arms = ", ".join(dict.fromkeys(arm for _, _, arm, _, _ in missing))
            asked = ": the last command finished without asking for them" if complete else ""
            reasons.append(
                f"setting {setting['setting']}: {len(missing)} of {len(cells)} runs (start, arm, seed) "
                f"have no final round yet{asked} (arms {arms})"
            )
    return Section("This run is incomplete.", sentences=reasons, warning=True) if reasons else None


@PAGE.section
def scores(run: RunResults) -> Section:
    """Means over seeds at the final round, and paired differences from the baseline, by setting."""
    if not run.results:
        return Section("Results", "There are no results yet.")
    below = []
    for setting, own in by_setting(run.rows).items():
        tables = {metric: result_tables(own, [metric]) for metric in metrics_in(own)}
        first = [table for metric in headline(own) for table in tables.pop(metric)]
        others = [*chain(*tables.values())]
        more = [Section("Other metrics", tables=others, folded=True)] if others else []
        below.append(Section(setting or "All arms", tables=first, sections=more))
    return Section("Results", "Held-out split, final round.", sections=below)


@PAGE.section
def findings(run: RunResults) -> Section:
    """Arms without a gain, idle layers, dropped replies and failed clients."""
    found = [
        *sentences.doubts(run.results),
        *sentences.dropped(run.alignment),
        *sentences.failed(run.rows),
    ]
    idle = sentences.idle_layers(run.alignment)
    folded = [Section("Layers without effect", sentences=idle, folded=True)] if idle else []
    compared = any(result.difference for result in run.results)
    text = "" if found or idle else "No such case among the results with intervals."
    if not compared:
        text = f"There is no comparison with {BASELINE} yet."
    return Section("What changed nothing, hurt or stayed within noise", text, found, sections=folded)


@PAGE.section
def settings(run: RunResults) -> Section:
    """Pictures and partitions of every setting."""
    (run.folder / "plots").mkdir(exist_ok=True)
    rows, alignment = by_setting(run.rows), by_setting(run.alignment)
    partition = run.objects["partition.json"]
    below, stems = [], set[str]()
    for setting in dict.fromkeys([*partition, *rows]):
        described = {"label_names": [], "seeds": {}, **partition.get(setting, {})}
        names, seeds = described["label_names"], described["seeds"]
        name = file_name(setting) or "run"
        name += f"-{len(stems)}" if name in stems else ""
        stems.add(name)
        stem = str(run.folder / "plots" / name)
        drawn = _result_pictures(stem, rows.get(setting, []), alignment.get(setting, []))
        for seed, first in list(seeds.items())[:1]:
            caption = f"rows per client and class, with held-out rows of the clients, seed {seed}"
            drawn[caption] = plots.partition_plot(Path(f"{stem}-partition.png"), first["counts"], names)
        tables = [
            partition_table(own["counts"], names, setting, seed, most=None)
            for seed, own in seeds.items()
        ]
        folded = [Section("Partition of every seed", tables=tables, folded=True)] if tables else []
        pictures = {caption: data_uri(path) for caption, path in drawn.items()}
        below.append(Section(setting or "All arms", pictures=pictures, sections=folded))
    return Section("Pictures", sections=below)


@PAGE.section
def repeat(run: RunResults) -> Section:
    """Command, configurations and versions."""
    command = run.objects["config.json"].get("command")
    below = [
        Section(
            f"Configuration of {setting['setting'] or 'this run'}", terms=in_use(setting), folded=True
        )
        for setting in run.settings
    ]
    versions = run.objects["versions.json"]
    if versions:
        below.append(Section("Versions", terms=versions, folded=True))
    text = "" if command else "The command was not recorded."
    return Section("To repeat", text, code=command or "", sections=below)


def in_use(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that have an effect and are not empty."""
    unused = {name for name, value in setting.items() if value in (None, "")}
    unused |= set(OF_SMALL_MODEL if setting.get("model") else ())
    unused |= set(OF_PRETRAINING if "pretrained" not in setting["starts"] else ())
    unused |= {"server_lr"} if setting.get("server") == "mean" else set()
    return {name: value for name, value in setting.items() if name not in unused}


def file_name(name: str) -> str:
    """Return a name as part of a file name: at most 60 letters, digits, ``_`` and ``-``."""
    return re.sub(r"[^a-zA-Z0-9_]+", "-", name)[:60]


def _described(settings: Sequence[Row]) -> dict[str, list[str]]:
    """Return the names of the settings' data and models, without repetitions."""
    data = dict.fromkeys(str(setting.get("data", "")) for setting in settings)
    models = dict.fromkeys(
        Path(setting["model"]).name if setting.get("model") else str(setting.get("architecture", ""))
        for setting in settings
    )
    found = {"data": data, "model": models}
    return {name: shown for name, values in found.items() if (shown := list(filter(None, values)))}


def _result_pictures(stem: str, rows: Sequence[Row], alignment: Sequence[Row]) -> dict[str, Path]:
    """Draw the metrics and the heat map of a setting; return paths by caption."""
    arms = list(dict.fromkeys(str(row["arm"]) for row in rows))
    drawn = {}
    for metric in headline(rows):
        caption = f"{described(metric)} on the held-out split by round; band: ± sd over seeds"
        drawn[caption] = plots.metric_plot(Path(f"{stem}-{file_name(metric)}.png"), rows, metric, arms)
    aligned = [row for row in alignment if "before" in row]
    if aligned:
        drawn[heat_map.caption(aligned)] = heat_map.alignment_plot(
            Path(f"{stem}-alignment.png"), aligned
        )
    return drawn
