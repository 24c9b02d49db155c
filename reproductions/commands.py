"""The laboratory's command, which repeats a page of docs/results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import Annotated, Any

import typer

from fedrot.simulations.cli.commands import command, command_line, console, say
from fedrot.simulations.cli.experiment_commands import DryRun, Workers
from fedrot.simulations.engine import Machine
from fedrot.simulations.experiment_files import bundled_files, read_experiments
from fedrot.simulations.settings import Experiment

app = typer.Typer()

#: Sizes of the subsets of clients for which a strategy stands, by its ``clients`` in a file.
SUBSETS = {"pairs": lambda count: (2,), "subsets": lambda count: range(2, count)}


def _completed(incomplete: str) -> list[str]:
    known = {**bundled_files(), **bundled_files("task")}
    return [name for name in known if name.startswith(incomplete)]


@command(
    app,
    "python -m reproductions one-shot --data-dir data --out runs/one-shot",
    "python -m reproductions barriers --data-dir data --out runs/barriers --quick",
)
def repeat(
    file: Annotated[
        Path,
        typer.Argument(
            help="Name of a page's file, or a TOML file of [[experiment]] or, of barriers, [[task]].",
            autocompletion=_completed,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for results; what it has is not run again.")],
    data_dir: Annotated[
        Path | None, typer.Option(help=Experiment.model_fields["data_dir"].description)
    ] = None,
    workers: Workers = None,
    ray: Annotated[str, typer.Option(help="Address of a Ray cluster.")] = "",
    gpus: Annotated[float, typer.Option(help="GPUs per job.")] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="The small variant of minutes.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Repeat a page of docs/results: experiments, or loss barriers."""
    of_barriers = str(file) in bundled_files("task") or (
        file.is_file() and "\n[[task]]" in f"\n{file.read_text('utf-8', errors='replace')}"
    )
    if not of_barriers:
        from fedrot.simulations.simulate import simulate

        found, machine = experiments_of(file, data_dir, quick=quick), Machine(workers, ray, gpus)
        simulate(found, out, command_line(), console, machine, dry_run=dry_run)
        return
    for name, value in {"ray": ray, "gpus": gpus, "dry-run": dry_run}.items():
        if value:
            raise ValueError(f"--{name} has an effect only on experiments. Leave it out.")
    from reproductions.barriers.grid import read_cells, run_grid
    from reproductions.barriers.summary import tables

    cells = read_cells(file, data_dir, quick=quick)
    try:
        lines = run_grid(cells, out, command_line(), say, workers)
    except KeyboardInterrupt:
        say(f"Interrupted; the finished cells are in {out}. Repeat the command to continue.")
        raise
    for table in tables(lines):
        console.print(table)
    console.print(f"Summary: {out / 'summary.md'}")


def experiments_of(file: Path, data_dir: Path | None = None, *, quick: bool = False) -> list[Experiment]:
    """Return the experiments of a file; a strategy may have ``clients = "pairs"`` or ``"subsets"``."""
    tables = read_experiments(file, quick=quick)
    for table in tables:
        clients = table.get("clients", Experiment.model_fields["clients"].default)
        if isinstance(table["strategies"], list):
            table["strategies"] = [*_expanded(table["strategies"], clients)]
    return [Experiment.from_flat({**table, "data_dir": data_dir}) for table in tables]


def _expanded(strategies: Iterable[Any], clients: int) -> Iterator[Any]:
    """Yield strategies, those of all pairs or subsets of clients as one each."""
    for strategy in strategies:
        each = strategy.get("clients") if isinstance(strategy, Mapping) else None
        sizes = SUBSETS[each](clients) if isinstance(each, str) and each in SUBSETS else ()
        subsets = chain.from_iterable(combinations(range(clients), size) for size in sizes)
        names = ((own, f"{strategy['name']} {'+'.join(map(str, own))}") for own in subsets)
        yield from ({**strategy, "clients": own, "name": name} for own, name in names)
        if not sizes:
            yield strategy
