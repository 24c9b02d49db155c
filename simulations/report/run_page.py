"""The page ``report.html`` of a run folder, complete or not, its sections and findings in sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from fedrot._io import read_json, refuse_links
from fedrot.errors import FedrotError
from fedrot.simulations.federation.run_folder import CENTRAL, read_alignment, read_results, rows_file
from fedrot.simulations.report import heat_map, plots
from fedrot.simulations.report.findings import sentences
from fedrot.simulations.report.findings.shares import share_table
from fedrot.simulations.report.html_page import HtmlPage, Values, data_uri
from fedrot.simulations.report.summaries import (
    LOWER_IS_BETTER,
    Row,
    by_setting,
    headline,
    metrics_in,
    setting_of,
)
from fedrot.simulations.report.tables import (
    BASELINE,
    Line,
    markdown_table,
    result_lines,
)

ROWS = "rows.jsonl"


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


#: The JSON files of a run folder, and what the page reads of them.
OBJECTS: Mapping[str, TypeAdapter[Any]] = {
    "config.json": TypeAdapter(_Config),
    "versions.json": TypeAdapter(dict[str, str]),
    "partition.json": TypeAdapter(dict[str, _Partition]),
    "status.json": TypeAdapter(dict[str, bool]),
}


@dataclass(frozen=True)
class RunResults:
    """The files of a run folder by name, empty if missing or unreadable, and its result table."""

    folder: Path
    rows: Sequence[Row]
    alignment: Sequence[Row]
    objects: dict[str, dict[str, Any]]
    metrics: Sequence[str]
    lines: Sequence[Line]

    @property
    def compared(self) -> bool:
        """Whether any arm is compared with the baseline."""
        return any(difference for line in self.lines for difference in line.differences)


def write_report(run_dir: Path) -> Path:
    """Draw the plots of a run folder and write its ``report.html``; returns the page's path.

    Missing files and unfinished lines are left out, and the page says why the run is incomplete. The
    page embeds its plots; page and plots are replaced whole. ``FileNotFoundError`` without a folder.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"there is no run folder {run_dir}; check the path")
    refuse_links(run_dir)
    rows = read_results(run_dir) if rows_file(run_dir) else []
    alignment = read_alignment(run_dir)
    objects = {name: _object(run_dir / name) for name in OBJECTS}
    metrics = metrics_in(rows)
    run = RunResults(run_dir, rows, alignment, objects, metrics, result_lines(rows, metrics))
    return PAGE.write(run_dir / "report.html", run_dir.resolve().name, run)


#: Returns a table for ``markdown_report`` from the rows and the settings of a run, empty for none.
MarkdownTable = Callable[[Sequence[Row], Sequence[Mapping[str, Any]]], str]

#: Tables of plug-ins, between the results and what alignment found.
MARKDOWN_TABLES: list[MarkdownTable] = []


def markdown_report(run_dir: Path) -> str:
    """Return the tables of a run folder as Markdown: results, those of plug-ins, shares found."""
    rows, settings = read_results(run_dir), _object(run_dir / "config.json").get("settings", [])
    shares = share_table(read_alignment(run_dir))
    tables = [
        markdown_table(rows),
        *(table(rows, settings) for table in MARKDOWN_TABLES),
        shares.markdown() if shares is not None else "",
    ]
    return "\n".join(filter(None, tables))


def _object(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty if it is missing or unreadable, or if it is not of its kind."""
    try:
        found = read_json(path)
        OBJECTS[path.name].validate_python(found)
    except (OSError, FedrotError, ValidationError):
        return {}
    return found


PAGE: HtmlPage[RunResults] = HtmlPage()


@PAGE.section
def verdict(run: RunResults) -> Values | None:
    """Date, data and models; whether alignment helped, in sentences; what their words mean."""
    if not run.rows:
        return None
    settings = run.objects["config.json"].get("settings", [])
    date = run.objects["versions.json"].get("date", "")
    about = [date, *(f"{name}: {', '.join(found)}" for name, found in _described(settings).items())]
    used = {str(row[key]) for row in run.rows for key in ("start", "arm")}
    words = {word: meaning for word, meaning in sentences.WORDS.items() if word in used}
    said = sentences.verdicts(run.rows)
    return {
        "about": " · ".join(filter(None, about)),
        "title": "Did alignment help?",
        "sentences": said,
        "words": words,
    }


@PAGE.section
def incomplete(run: RunResults) -> Values | None:
    """Reasons why the run is not complete; left out if it is."""
    files = {**{name: run.objects[name] for name in OBJECTS if name != "status.json"}, ROWS: run.rows}
    reasons = [f"{name} is missing or unreadable" for name, found in files.items() if not found]
    if not run.objects["status.json"].get("complete"):
        reasons.append("the run has not finished: it was interrupted, failed or still goes on")
    done = {
        (setting_of(row), row["start"], row["arm"], row["seed"], row["round"])
        for row in run.rows
        if row["scope"] == CENTRAL
    }
    for setting in run.objects["config.json"].get("settings", []):
        cells = [
            (setting["setting"], start, arm, seed, setting["rounds"])
            for start in setting["starts"]
            for arm in setting["arms"]
            for seed in setting["seeds"]
        ]
        missing = sum(cell not in done for cell in cells)
        if missing:
            reasons.append(
                f"setting {setting['setting']}: {missing} of {len(cells)} runs (start, arm, seed) "
                "have no final round yet"
            )
    return {"reasons": reasons} if reasons else None


@PAGE.section
def results(run: RunResults) -> Values:
    """Means over seeds at the final round."""
    return {"lines": run.lines, "metrics": run.metrics, **_columns(run.lines)}


@PAGE.section
def differences(run: RunResults) -> Values | None:
    """Paired differences from the baseline."""
    lower = [metric for metric in run.metrics if metric in LOWER_IS_BETTER]
    shown = {"lines": run.lines, "metrics": run.metrics, "lower": lower, "baseline": BASELINE}
    return {**shown, **_columns(run.lines)} if run.compared else None


@PAGE.section
def scrambling(run: RunResults) -> Values | None:
    """Changes of all arms by scrambling."""
    found = sentences.costs_of_scrambling(run.rows, run.metrics)
    return {"sentences": found} if found else None


@PAGE.section
def shares(run: RunResults) -> Values | None:
    """Shares found by part, beside chance; left out if no row knows what chance removes."""
    table = share_table(run.alignment)
    return {"table": table} if table is not None else None


@PAGE.section
def findings(run: RunResults) -> Values:
    """Arms without a gain, idle layers, dropped replies and failed clients."""
    found = [
        *sentences.doubts(run.lines, run.metrics),
        *sentences.idle_layers(run.alignment),
        *sentences.dropped(run.alignment),
        *sentences.failed(run.rows),
    ]
    return {"findings": found, "compared": run.compared, "baseline": BASELINE}


@PAGE.section
def settings(run: RunResults) -> Values:
    """The pictures and the partitions of every setting."""
    (run.folder / "plots").mkdir(exist_ok=True)
    rows, alignment = by_setting(run.rows), by_setting(run.alignment)
    partition = run.objects["partition.json"]
    found, stems = [], set[str]()
    for setting in dict.fromkeys([*partition, *rows]):
        described = {"label_names": [], "seeds": {}, **partition.get(setting, {})}
        names, seeds = described["label_names"], described["seeds"]
        name = file_name(setting) or "run"
        name += f"-{len(stems)}" if name in stems else ""
        stems.add(name)
        stem = str(run.folder / "plots" / name)
        drawn = _result_pictures(stem, rows.get(setting, []), alignment.get(setting, []))
        for seed, first in list(seeds.items())[:1]:
            caption = f"rows per client and class, own held-out rows included, seed {seed}"
            drawn[caption] = plots.partition_plot(Path(f"{stem}-partition.png"), first["counts"], names)
        pictures = [(caption, data_uri(path)) for caption, path in drawn.items()]
        found.append({"setting": setting, "pictures": pictures, "names": names, "seeds": seeds})
    return {"sections": found}


@PAGE.section
def repeat(run: RunResults) -> Values:
    """The command, the configurations and the versions."""
    config = run.objects["config.json"]
    shown = {"command": config.get("command"), "settings": config.get("settings", [])}
    return {**shown, "versions": run.objects["versions.json"]}


def _columns(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the columns of names that are not the same in all lines, and the seeds if they are."""
    names = [name for name in ("setting", "start") if len({getattr(line, name) for line in lines}) > 1]
    seeds = {line.seeds for line in lines}
    seeds |= {found.n for line in lines for found in line.differences if found is not None}
    return {"names": names, "seeds": seeds.pop() if len(seeds) == 1 else 0}


def file_name(name: str) -> str:
    """Return a name without separators of paths and of words, short enough for a file's name."""
    return re.sub(r"[^a-zA-Z0-9_]+", "-", name)[:60]


def _described(settings: Sequence[Row]) -> dict[str, list[str]]:
    """Return the data and the models of the settings, each once."""
    data = dict.fromkeys(str(setting.get("data", "")) for setting in settings)
    models = dict.fromkeys(
        Path(setting["model"]).name if setting.get("model") else str(setting.get("architecture", ""))
        for setting in settings
    )
    found = {"data": data, "model": models}
    return {name: shown for name, values in found.items() if (shown := list(filter(None, values)))}


def _result_pictures(stem: str, rows: Sequence[Row], alignment: Sequence[Row]) -> dict[str, Path]:
    """Draw the metrics and the heat map of a setting; return the paths by caption."""
    arms = list(dict.fromkeys(str(row["arm"]) for row in rows))
    drawn = {}
    for metric in headline(rows):
        better = "lower" if metric in LOWER_IS_BETTER else "higher"
        caption = f"{metric} on the held-out split by round ({better} is better; band: ± sd)"
        drawn[caption] = plots.metric_plot(Path(f"{stem}-{file_name(metric)}.png"), rows, metric, arms)
    aligned = [row for row in alignment if "before" in row]
    if aligned:
        drawn[heat_map.caption(aligned)] = heat_map.alignment_plot(
            Path(f"{stem}-alignment.png"), aligned
        )
    return drawn
