"""The self-contained HTML report of a run folder, complete or not."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedrot._io import replacing
from fedrot.simulations.federation.run_folder import read_rows, rows_file
from fedrot.simulations.report.summaries import CENTRAL, LOWER_IS_BETTER, Row, metrics_in, setting_of
from fedrot.simulations.report.tables import (
    BASELINE,
    failed_clients,
    findings,
    format_difference,
    format_score,
    headline,
    markdown_table,
    partition_table,
    result_lines,
    scrambling,
    summary_tables,
)

__all__ = ["markdown_table", "partition_table", "summary_tables", "write_report"]


def write_report(run_dir: Path) -> Path:
    """Draw the plots of a run folder and write its ``report.html``; returns the page's path.

    Reads ``config.json`` (``command``, ``settings``), ``versions.json``, ``status.json``,
    ``partition.json``, ``rows.jsonl`` and ``alignment.jsonl``. Whatever is missing or cut short is
    left out, and the page then says that the run is incomplete and why. The page holds its plots
    and needs no other file. Both are replaced whole.

    Raises:
        FileNotFoundError: if ``run_dir`` is not a folder.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"there is no run folder {run_dir}; check the path")
    rows, alignment = (_rows(run_dir, name) for name in ("rows.jsonl", "alignment.jsonl"))
    config, partition = _json(run_dir, "config.json"), _json(run_dir, "partition.json")
    metrics = metrics_in(rows)
    lines = result_lines(rows, metrics)
    return write_page(
        run_dir / "report.html",
        "report.html.j2",
        name=run_dir.resolve().name,
        incomplete=_incomplete(run_dir, config, rows),
        command=config.get("command"),
        metrics=metrics,
        lower=[metric for metric in metrics if metric in LOWER_IS_BETTER],
        lines=lines,
        scrambling=scrambling(lines, metrics),
        findings=findings(lines, metrics, alignment) + failed_clients(rows),
        compared=any(difference for line in lines for difference in line.differences),
        baseline=BASELINE,
        sections=_sections(run_dir, rows, alignment, partition),
        settings=config.get("settings", []),
        versions=_json(run_dir, "versions.json"),
    )


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Render a template of this package into a file, which is replaced whole."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedrot.simulations.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(score=format_score, difference=format_difference)
    page = environment.get_template(template).render(**values)
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _sections(
    run_dir: Path,
    rows: Sequence[Row],
    alignment: Sequence[Row],
    partition: dict[str, Any],
) -> list[dict[str, Any]]:
    """Per setting its plots, as (caption, data URI), and the partition of its first seed."""
    from fedrot.simulations.report import heat_map, plots

    folder = run_dir / "plots"
    folder.mkdir(exist_ok=True)
    sections = []
    for setting in dict.fromkeys([*partition, *map(setting_of, rows)]):
        stem = re.sub(r"\W+", "-", setting) or "run"
        own = [row for row in rows if setting_of(row) == setting]
        aligned = [row for row in alignment if setting_of(row) == setting and "before" in row]
        arms = list(dict.fromkeys(str(row["arm"]) for row in own))
        pictures = []
        for metric in headline(own):
            better = "lower" if metric in LOWER_IS_BETTER else "higher"
            caption = f"{metric} on the held-out split by round ({better} is better; band: ± sd)"
            picture = plots.metric_plot(folder / f"{stem}-{metric}.png", own, metric, arms)
            pictures.append((caption, picture))
        if aligned:
            picture = heat_map.alignment_plot(folder / f"{stem}-alignment.png", aligned)
            pictures.append((heat_map.CAPTION, picture))
        described = partition.get(setting, {})
        names, seeds = described.get("label_names", []), described.get("seeds", {})
        seed, first = next(iter(seeds.items()), (None, None))
        if first:
            path = folder / f"{stem}-partition.png"
            picture = plots.partition_plot(path, first["counts"], names)
            pictures.append(
                (
                    f"rows per client and class, own held-out rows included, seed {seed}",
                    picture,
                )
            )
        embedded = [(caption, data_uri(path)) for caption, path in pictures]
        sections.append({"setting": setting, "pictures": embedded, "names": names, "seeds": seeds})
    return sections


def _incomplete(run_dir: Path, config: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """Why the run is not complete; empty if it is."""
    reasons = [
        f"{name} is missing or unreadable"
        for name in ("config.json", "versions.json", "partition.json", "rows.jsonl")
        if not (_rows if name == "rows.jsonl" else _json)(run_dir, name)
    ]
    if not _json(run_dir, "status.json").get("complete"):
        reasons.append("the run has not finished: it was interrupted, failed or still goes on")
    done = {
        (setting_of(row), row["start"], row["arm"], row["seed"], row["round"])
        for row in rows
        if row["scope"] == CENTRAL
    }
    for setting in config.get("settings", []):
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
    return reasons


def _rows(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return read_rows(run_dir, name) if rows_file(run_dir, name) else []


def _json(run_dir: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((run_dir / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def data_uri(path: Path) -> str:
    """Return a PNG file as what a page can hold in the place of a link."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
