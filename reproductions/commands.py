"""The laboratory's command, which repeats a page of docs/results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedrot.simulations.cli.commands import command, command_line, console
from fedrot.simulations.engine import Machine
from fedrot.simulations.experiment import Experiment, read_experiments

app = typer.Typer()


#: The files of pages.
GRIDS = Path(__file__).parent / "grids"


@command(
    app,
    "python -m reproductions one-shot --data-dir data --out runs/one-shot",
    "python -m reproductions barriers --data-dir data --out runs/barriers",
)
def repeat(
    file: Annotated[
        Path,
        typer.Argument(
            help=(
                "Name of a page's file, or a TOML file of [[experiment]] or, of "
                "barriers, [[task]]."
            ),
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for results; what it has is not run again.")
    ],
    data_dir: Annotated[
        Path | None, typer.Option(help=Experiment.model_fields["data_dir"].description)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one per core.")
    ] = None,
    ray: Annotated[str, typer.Option(help="Address of a Ray cluster.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, run nothing.")
    ] = False,
) -> None:
    """Repeat a page of docs/results: experiments, or loss barriers."""
    file = file if file.suffix else GRIDS / f"{file}.toml"
    if "\n[[task]]" not in file.read_text("utf-8"):
        from fedrot.simulations.simulate import simulate

        fields = {} if data_dir is None else {"data_dir": data_dir}
        experiments = read_experiments(file, fields)
        machine = Machine(workers, ray)
        simulate(experiments, out, command_line(), console, machine, dry_run=dry_run)
        return
    for name, value in {"ray": ray, "dry-run": dry_run}.items():
        if value:
            raise ValueError(
                f"--{name} has an effect only on experiments. Leave it out."
            )
    from reproductions.barriers.grid import read_cells, run_grid
    from reproductions.barriers.summary import tables

    cells = read_cells(file, data_dir)
    try:
        lines = run_grid(cells, out, command_line(), console.print, workers)
    except KeyboardInterrupt:
        console.print(
            f"Interrupted; the finished cells are in {out}. Repeat the command to "
            "continue."
        )
        raise
    console.print(*tables(lines))
