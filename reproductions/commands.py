"""The laboratory's commands: repeat, port, canonical."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.main import get_group

from fedrot.simulations.cli.commands import command, command_line, console, examples, names, say
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
from reproductions.port.port_settings import PortSettings

app = typer.Typer(
    no_args_is_help=True,
    epilog=examples("python -m reproductions one-shot --data-dir data --out runs/one-shot --quick"),
)


@app.callback()
def _described() -> None:
    """Repeat a page of docs/results by its name, or try what the product leaves out."""


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
    model: Annotated[str | None, typer.Option(help="Overrides model of a grid of settings.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Of barriers: cells or settings, separated by commas.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Of barriers: instead of the grid's, separated by commas.")
    ] = None,
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
        _refuse({"only": only, "methods": methods}, "grids of barriers")
        from fedrot.simulations.federation.grid_run import simulate

        configs = configs_of(grid, quick=quick, data_dir=data_dir, model=model)
        simulate(configs, out, command_line(), console, Machine(workers, ray, gpus), dry_run=dry_run)
        return
    _refuse({"model": model, "ray": ray, "gpus": gpus, "dry-run": dry_run}, "grids of settings")
    from fedrot.simulations.barrier.barrier_report import summarise, tables
    from reproductions.barriers.grid import Grid, run_grid

    described = Grid.read(grid, data_dir, quick=quick)
    if only:
        described = described.only(names(only))
    if methods:
        described = described.measuring(names(methods))
    try:
        lines = run_grid(described, out, command_line(), say, workers)
    except KeyboardInterrupt:
        say(f"Interrupted; the finished cells are in {out}. Repeat the command to continue.")
        raise
    for table in tables(summarise(lines)):
        console.print(table)
    console.print(f"Summary: {out / 'summary.md'}")


def _refuse(given: dict[str, Any], which: str) -> None:
    for name, value in given.items():
        if value:
            raise ValueError(f"--{name} has an effect only on {which}. Leave it out.")


@command(app, "python -m reproductions canonical models/a models/a-canonical")
def canonical(
    model: Annotated[str, typer.Argument(help="Folder of a saved model, or a hub name.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
) -> None:
    """Write a pre-norm model whose norms are folded: the same function, a stream that can be rotated."""
    from reproductions.port.canonical_model import write_canonical

    with console.status(escape(f"Folding {model}")):
        found = write_canonical(model, out)
    say(f"Folded: {len(found.folded)} norms. The outputs change by {found.change:.1e} of their size.")
    if found.untied:
        say(f"Note: {' and '.join(found.untied)} were one table, and are two now.")
    say(f"Written: {out}")


@command(
    app,
    "python -m reproductions port models/base models/tuned models/other-base --out models/ported",
    fields=PortSettings,
)
def port(
    base: Annotated[str, typer.Argument(help="The model that was fine-tuned: a folder or hub name.")],
    tuned: Annotated[str, typer.Argument(help="The fine-tuned model.")],
    new_base: Annotated[str, typer.Argument(help="Another base of the same architecture.")],
    *,
    out: Annotated[Path, typer.Option(help="A new folder.")],
    settings: dict[str, Any],
) -> None:
    """Carry a fine-tuning from its base over to another base of the same architecture."""
    from reproductions.port.porting import port as carry

    with console.status(escape(f"Porting {tuned}")):
        found = carry(base, tuned, new_base, out, PortSettings(**settings))
    if found.matched is not None:
        how = "rotated" if found.rotated else "permuted"
        left = found.matched.after / max(found.matched.before, 1e-30)
        say(f"The residual stream was {how}. Of the bases' squared distance {left:.0%} is left.")
    for part, reason in found.still.items():
        say(f"Note: part '{part}' was not moved: {reason}")
    if found.taken:
        say(f"Note: the bases lack {', '.join(found.taken)}; they were moved as a whole.")
    say(f"Written: {out}")


#: The names of the commands; other words are names of grids.
NAMES = tuple(get_group(app).commands)
