"""The page ``report.html`` of a run folder, complete or not, and its sections."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True)
class RunResults:
    """The files of a run folder; missing and unreadable ones are empty."""

    folder: Path

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file."""
        try:
            found = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of results."""
        return self._rows("rows.jsonl")

    @cached_property
    def alignment(self) -> list[dict[str, Any]]:
        """The rows of the alignment report."""
        return self._rows("alignment.jsonl")

    def _rows(self, name: str) -> list[dict[str, Any]]:
        return read_rows(self.folder, name) if rows_file(self.folder, name) else []

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics of the central evaluation."""
        return metrics_in(self.rows)

    @cached_property
    def lines(self) -> list[Line]:
        """The lines of the result table."""
        return result_lines(self.rows, self.metrics)

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
    return PAGE.write(run_dir / "report.html", run_dir.resolve().name, RunResults(run_dir))


PAGE: HtmlPage[RunResults] = HtmlPage()


@PAGE.section
def incomplete(run: RunResults) -> Values | None:
    """Reasons why the run is not complete; left out if it is."""
    reasons = [
        f"{name} is missing or unreadable"
        for name in ("config.json", "versions.json", "partition.json", "rows.jsonl")
        if not (run.rows if name == "rows.jsonl" else run.json(name))
    ]
    if not run.json("status.json").get("complete"):
        reasons.append("the run has not finished: it was interrupted, failed or still goes on")
    done = {
        (setting_of(row), row["start"], row["arm"], row["seed"], row["round"])
        for row in run.rows
        if row["scope"] == CENTRAL
    }
    for setting in run.json("config.json").get("settings", []):
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
    partition = run.json("partition.json")
    found = []
    for setting in dict.fromkeys([*partition, *map(setting_of, run.rows)]):
        described = partition.get(setting, {})
        names, seeds = described.get("label_names", []), described.get("seeds", {})
        pictures = [(caption, data_uri(path)) for caption, path in _pictures(run, setting, seeds, names)]
        found.append({"setting": setting, "pictures": pictures, "names": names, "seeds": seeds})
    return {"sections": found}


def _pictures(
    run: RunResults, setting: str, seeds: dict[str, Any], names: Sequence[str]
) -> list[tuple[str, Path]]:
    """Draw the plots of a setting; returns captions and paths."""
    stem = str(run.folder / "plots" / (re.sub(r"\W+", "-", setting) or "run"))
    own: list[Row] = [row for row in run.rows if setting_of(row) == setting]
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
    config = run.json("config.json")
    return {
        "command": config.get("command"),
        "settings": config.get("settings", []),
        "versions": run.json("versions.json"),
    }
