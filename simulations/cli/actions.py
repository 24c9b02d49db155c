"""Actions of the commands, once their options are read, and what they print."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from fedrot.simulations.cli.terminal import FAILED, command_line, complain_in_red, console, say


def simulate(settings: list[dict[str, Any]], out: Path, **how: Any) -> None:
    """Run settings, flat as the command line and grids have them, into one folder.

    Args:
        how: see ``runner.simulate``.

    Raises:
        ValueError: a setting cannot be run, or two have one name.
        KeyboardInterrupt: the user interrupted it.
    """
    from fedrot.simulations.config import SimulationConfig
    from fedrot.simulations.federation import runner

    configs = [SimulationConfig.from_flat(setting) for setting in settings]
    names = [config.setting for config in configs]
    if len(set(names)) != len(names):
        raise ValueError(f"The settings need names of their own, but are called {names}.")
    if not runner.simulate(configs, out, command_line(), console, **how):
        raise KeyboardInterrupt


def report_folder(folder: Path, markdown: Path | None) -> None:
    """Print the results of a run folder and write its report, and its table as Markdown.

    Raises:
        ValueError: there is no run.
    """
    from fedrot.simulations.federation.run_folder import rows_file
    from fedrot.simulations.federation.runner import present

    if rows_file(folder) is None:
        raise ValueError(f"'{folder}' is not a run folder: it has no rows.jsonl.")
    present(folder, console)
    if markdown is not None:
        from fedrot.simulations.federation.run_folder import read_rows
        from fedrot.simulations.report.page import markdown_table

        markdown.write_text(markdown_table(read_rows(folder)), encoding="utf-8")


def check(model: str, parts: str | None, seed: int, as_json: bool) -> None:
    """Print what a check of a model found; ends with ``FAILED`` if its outputs change."""
    from fedrot.simulations.check.check_report import tables, verdict
    from fedrot.simulations.check.checking import check_model
    from fedrot.simulations.merge.merging import options_of

    chosen = None if parts is None else options_of(parts).parts
    with nullcontext() if as_json else console.status(escape(f"Checking {model}")):
        report = check_model(model, chosen, seed)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        for table in tables(report):
            console.print(table)
        for part, reason in report.refused.items():
            say(f"Part '{part}' cannot be moved: {reason}")
        for note in report.notes:
            say(f"Note: {note}")
        (say if report.holds else complain_in_red)(verdict(report))
    if not report.holds:
        raise typer.Exit(FAILED)


def list_families(as_json: bool) -> None:
    """Print the supported families."""
    from fedrot.simulations.check.check_report import families_table
    from fedrot.symmetry import FAMILIES

    listed = {family.name: family.model_types for family in FAMILIES}
    if as_json:
        typer.echo(json.dumps({"families": listed}))
    else:
        console.print(families_table(listed))
