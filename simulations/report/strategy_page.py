"""The self-contained HTML page of what a strategy reported, from whatever run it comes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedrot.simulations.federation.run_folder import read_rows
from fedrot.simulations.report import heat_map
from fedrot.simulations.report.page import data_uri, write_page
from fedrot.simulations.report.plots import rounds_plot
from fedrot.simulations.report.summaries import Row

#: The file with a run's metrics, if it lies beside the report and no other is named.
BESIDE = "metrics.jsonl"
#: Keys of report rows that say why a reply has no part, and what the page calls them.
LOST = {"dropped": "dropped", "failed": "failed"}

Series = dict[str, dict[int, float]]


def write_strategy_report(report: Path, out: Path | None = None, metrics: Path | None = None) -> Path:
    """Write the page of a ``report_path`` of ``FedRot`` or ``Aligned``; returns the page's path.

    It shows the heat map of the alignment, the replies that were lost by client and reason, and the
    metrics by round. An unfinished last line is left out.

    Args:
        report: JSON lines that the strategy wrote.
        out: the page; beside the report, with its name and ``.html``, if None.
        metrics: the strategy's ``metrics_path``; ``metrics.jsonl`` beside the report, if there is one.

    Raises:
        ValueError: a file is not what the strategy writes.
        OSError: a file cannot be read or written.
    """
    rows = _checked(report, ("round",))
    if all("stage" in row for row in rows):
        raise ValueError(f"'{report}' is what metrics_path received; give the file of report_path.")
    # An earlier run's files carry the same number: alignment.1.jsonl and metrics.1.jsonl.
    number = next((s for s in report.suffixes[:-1] if s[1:].isdecimal()), "")
    beside = report.with_name(f"{Path(BESIDE).stem}{number}{Path(BESIDE).suffix}")
    if metrics is None and beside.is_file() and beside != report:
        metrics = beside
    stages = _checked(metrics, ("round", "stage", "metrics")) if metrics is not None else []
    changing, constant = _series(stages)
    aligned = [row for row in rows if "before" in row]
    with tempfile.TemporaryDirectory() as folder:
        pictures = Path(folder)
        drawn = aligned and data_uri(heat_map.alignment_plot(pictures / "alignment.png", aligned))
        lines = changing and data_uri(rounds_plot(pictures / "metrics.png", changing))
    return write_page(
        out or report.with_suffix(".html"),
        "strategy.html.j2",
        name=report.stem,
        rounds=len({row["round"] for row in rows}),
        heat_map=drawn,
        caption=heat_map.CAPTION,
        lost=_lost(rows),
        failed=[(row["round"], row["lost"]) for row in rows if "lost" in row],
        metrics=lines,
        constant=constant,
    )


def _checked(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    rows = read_rows(path.parent, path.name)
    if not rows or not all(row.keys() >= {*keys} for row in rows):
        raise ValueError(
            f"'{path}' is not what a strategy writes: JSON lines with {', '.join(keys)} in each."
        )
    return rows


def _lost(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return who lost how many replies for which reason, most first."""
    found: dict[tuple[int, str, str], list[int]] = {}
    for row in rows:
        for key, what in LOST.items():
            if key in row:
                found.setdefault((row["client"], what, row[key]), []).append(row["round"])
    lines = [
        {"client": client, "what": what, "reason": reason, "rounds": sorted(rounds)}
        for (client, what, reason), rounds in found.items()
    ]
    return sorted(lines, key=lambda line: (-len(line["rounds"]), line["client"]))


def _series(stages: Iterable[Row]) -> tuple[Series, list[str]]:
    """Return the metrics by name and round, and those that never change, in words."""
    series: Series = {}
    for row in stages:
        for name, value in row["metrics"].items():
            several = isinstance(value, list)
            numbers = {f"{name}/{i}": v for i, v in enumerate(value)} if several else {name: value}
            for own, number in numbers.items():
                of = series.setdefault(f"{row['stage']}/{own}", {})
                of[int(row["round"])] = math.nan if number is None else float(number)
    same = {name: next(iter(s.values())) for name, s in series.items() if len(set(s.values())) == 1}
    words = [f"{name} = {value:g}" for name, value in same.items()]
    return {name: s for name, s in series.items() if name not in same}, words
