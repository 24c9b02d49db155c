"""The page ``report.html`` of a run folder, complete or not, and its sections."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrot.simulations.federation.run_folder import read_rows, rows_file
from fedrot.simulations.report import findings as sentences
from fedrot.simulations.report import heat_map, plots
from fedrot.simulations.report.html_page import HtmlPage, Values, data_uri
from fedrot.simulations.report.summaries import (
    CENTRAL,
    LOWER_IS_BETTER,
    Row,
    headline,
    metrics_in,
    setting_of,
)
from fedrot.simulations.report.tables import BASELINE, Line, result_lines

ROWS = ("rows.jsonl", "alignment.jsonl")
OBJECTS = ("config.json", "versions.json", "partition.json", "status.json")


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

    Reads ``config.json`` (``command``, ``settings``), ``versions.json``, ``status.json``,
    ``partition.json``, and the rows, as JSON lines or Parquet. Missing files and unfinished lines are
    left out, and the page says that the run is incomplete and why. The page embeds its plots and needs
    no other file. Page and plots are replaced whole.

    Raises:
        FileNotFoundError: if ``run_dir`` is not a folder.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"there is no run folder {run_dir}; check the path")
    rows, alignment = (read_rows(run_dir, n) if rows_file(run_dir, n) else [] for n in ROWS)
    objects = {name: _object(run_dir / name) for name in OBJECTS}
    metrics = metrics_in(rows)
    lines = result_lines(rows, metrics)
    run = RunResults(run_dir, rows, alignment, objects, metrics, lines)
    return PAGE.write(run_dir / "report.html", run_dir.resolve().name, run)


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


PAGE: HtmlPage[RunResults] = HtmlPage()


@PAGE.section
def incomplete(run: RunResults) -> Values | None:
    """Reasons why the run is not complete; left out if it is."""
    files = {**{name: run.objects[name] for name in OBJECTS[:3]}, ROWS[0]: run.rows}
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
    return {"lines": run.lines, "metrics": run.metrics}


@PAGE.section
def differences(run: RunResults) -> Values | None:
    """Paired differences from the baseline."""
    lower = [metric for metric in run.metrics if metric in LOWER_IS_BETTER]
    shown = {"lines": run.lines, "metrics": run.metrics, "lower": lower, "baseline": BASELINE}
    return shown if run.compared else None


@PAGE.section
def scrambling(run: RunResults) -> Values | None:
    """Changes of all arms by scrambling."""
    found = sentences.scrambling(run.lines, run.metrics)
    return {"sentences": found} if found else None


@PAGE.section
def findings(run: RunResults) -> Values:
    """Arms and layers in which alignment did nothing or hurt."""
    found = sentences.findings(run.rows, run.lines, run.metrics, run.alignment)
    return {"findings": found, "compared": run.compared, "baseline": BASELINE}


@PAGE.section
def settings(run: RunResults) -> Values:
    """The pictures and the partitions of every setting."""
    (run.folder / "plots").mkdir(exist_ok=True)
    partition = run.objects["partition.json"]
    found = []
    for setting in dict.fromkeys([*partition, *map(setting_of, run.rows)]):
        described = {"label_names": [], "seeds": {}, **partition.get(setting, {})}
        names, seeds = described["label_names"], described["seeds"]
        pictures = [(c, data_uri(path)) for c, path in _pictures(run, setting, seeds, names)]
        found.append({"setting": setting, "pictures": pictures, "names": names, "seeds": seeds})
    return {"sections": found}


def _pictures(
    run: RunResults, setting: str, seeds: dict[str, Any], names: Sequence[str]
) -> list[tuple[str, Path]]:
    """Draw the plots of a setting; returns captions and paths."""
    stem = str(run.folder / "plots" / (re.sub(r"\W+", "-", setting) or "run"))
    own = [row for row in run.rows if setting_of(row) == setting]
    aligned = [row for row in run.alignment if setting_of(row) == setting and "before" in row]
    arms = list(dict.fromkeys(str(row["arm"]) for row in own))
    pictures = []
    for metric in headline(own):
        better = "lower" if metric in LOWER_IS_BETTER else "higher"
        caption = f"{metric} on the held-out split by round ({better} is better; band: ± sd)"
        path = plots.metric_plot(Path(f"{stem}-{metric}.png"), own, metric, arms)
        pictures.append((caption, path))
    if aligned:
        path = heat_map.alignment_plot(Path(f"{stem}-alignment.png"), aligned)
        pictures.append((heat_map.CAPTION, path))
    for seed, first in list(seeds.items())[:1]:
        caption = f"rows per client and class, own held-out rows included, seed {seed}"
        path = plots.partition_plot(Path(f"{stem}-partition.png"), first["counts"], names)
        pictures.append((caption, path))
    return pictures


@PAGE.section
def repeat(run: RunResults) -> Values:
    """The command, the configurations and the versions."""
    config, versions = run.objects["config.json"], run.objects["versions.json"]
    settings = config.get("settings", [])
    return {"command": config.get("command"), "settings": settings, "versions": versions}
