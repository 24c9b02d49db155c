"""Barriers between two saved models: measured first, then written as one folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from fedrot.errors import FedrotError
from fedrot.simulations.barrier.barrier_lines import (
    BarrierLine,
    measure,
    training_batches,
    write_rows,
    write_whole,
)
from fedrot.simulations.barrier.barrier_methods import METHODS, check_methods
from fedrot.simulations.barrier.barrier_settings import BarrierSettings
from fedrot.simulations.federation.run_folder import versions


def compare_saved_models(
    a: Path,
    b: Path,
    out: Path,
    settings: BarrierSettings,
    command: str,
    console: Console,
) -> list[BarrierLine]:
    """Measure the line between two saved models under every method, and print and write the results.

    ``out`` holds ``config.json``, ``versions.json``, ``rows.jsonl``, ``summary.md`` and
    ``barrier.png``; it appears whole or not at all.

    Args:
        a, b: folders written by ``save_pretrained``; ``b`` is moved towards ``a``.

    Raises:
        FedrotError: bad input; the message says which.
    """
    from fedrot.simulations.barrier.barrier_report import markdown, plot, summarise, tables
    from fedrot.simulations.models.barrier_models import load_pair
    from fedrot.symmetry import symmetry_of

    points, rows = settings.points, settings.rows
    named = (settings.methods or "").split(",")
    methods = check_methods([name.strip() for name in named if name.strip()] or METHODS)
    if points < 3 or points % 2 == 0:
        raise FedrotError(f"points is {points}; it must be odd and at least 3, to include the middle.")
    if rows < 1:
        raise FedrotError(f"rows is {rows}; at least one is needed.")
    _refuse_filled(out)
    task, anchor, client = load_pair(a, b, **settings.model_dump(exclude={"methods", "points", "rows"}))
    if task.data.note:
        console.print(task.data.note, highlight=False)
    config: Any = anchor.config
    symmetry = symmetry_of(config, anchor.state_dict())
    batches = training_batches(task, anchor, rows)
    lines = []
    for name in methods:
        with console.status(f"{name}: matching, and {points} models to evaluate"):
            line = measure(
                name, anchor, client, symmetry, task, batches, points=points, cell=task.config.setting
            )
        lines.append(line)
    described = {
        "command": command,
        "models": [str(a.resolve()), str(b.resolve())],
        "points": points,
        "rows": rows,
        "methods": {name: METHODS[name].description for name in methods},
        "settings": task.config.model_dump(mode="json", exclude_defaults=True),
    }
    summaries = summarise(lines)
    with _whole_folder(out) as folder:
        write_whole(folder / "config.json", json.dumps(described, indent=2) + "\n")
        write_whole(folder / "versions.json", json.dumps(versions(), indent=2) + "\n")
        write_rows(folder / "rows.jsonl", lines)
        write_whole(folder / "summary.md", markdown(summaries))
        plot(folder / "barrier.png", lines)
    for table in tables(summaries):
        console.print(table)
    console.print(f"Results: {out}")
    return lines


def _refuse_filled(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"'{out}' is there already and not an empty folder. Choose another --out.")


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """Give a folder beside ``out`` that takes its place once everything is in it."""
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(f".{out.name}.{os.getpid()}")
    staging.mkdir()
    try:
        yield staging
        staging.replace(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
