"""The laboratory's command, which repeats a page of docs/results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedrot.simulations.cli.commands import command, command_line, console, say
from fedrot.simulations.cli.experiment_commands import (
    DryRun,
    Gpus,
    GridData,
    Quick,
    RayAddress,
    Workers,
    configs_of,
)
from fedrot.simulations.grids import bundled_grids
from fedrot.simulations.jobs import Machine

app = typer.Typer()


def _completed(incomplete: str) -> list[str]:
    known = {**bundled_grids("setting"), **bundled_grids("task")}
    return [name for name in known if name.startswith(incomplete)]


@command(
    app,
    "python -m reproductions one-shot --data-dir data --out runs/one-shot",
    "python -m reproductions barriers --data-dir data --out runs/barriers --quick",
)
def repeat(
    grid: Annotated[
        Path,
        typer.Argument(
            help="Name of a page's grid, or a TOML file of [[setting]] or, of barriers, [[task]].",
            autocompletion=_completed,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for results; what it holds is not done again.")],
    data_dir: GridData = None,
    workers: Workers = None,
    ray: RayAddress = "",
    gpus: Gpus = 0.0,
    quick: Quick = False,
    dry_run: DryRun = False,
) -> None:
    """Repeat a page of docs/results: a grid of federations, or one of loss barriers."""
    of_barriers = str(grid) in bundled_grids("task") or (
        grid.is_file() and "\n[[task]]" in f"\n{grid.read_text('utf-8', errors='replace')}"
    )
    if not of_barriers:
        from fedrot.simulations.federation.grid_run import simulate

        configs = configs_of(grid, quick=quick, data_dir=data_dir, model=None)
        simulate(configs, out, command_line(), console, Machine(workers, ray, gpus), dry_run=dry_run)
        return
    for name, value in {"ray": ray, "gpus": gpus, "dry-run": dry_run}.items():
        if value:
            raise ValueError(f"--{name} has an effect only on grids of settings. Leave it out.")
    from reproductions.barriers.grid import read_cells, run_grid
    from reproductions.barriers.summary import tables

    cells = read_cells(grid, data_dir, quick=quick)
    try:
        lines = run_grid(cells, out, command_line(), say, workers)
    except KeyboardInterrupt:
        say(f"Interrupted; the finished cells are in {out}. Repeat the command to continue.")
        raise
    for table in tables(lines):
        console.print(table)
    console.print(f"Summary: {out / 'summary.md'}")
