"""Commands for experiments: simulate, flower-app, report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from fedrot._io import replacing, write_text
from fedrot.simulations.cli.commands import command, command_line, console, given, need, say
from fedrot.simulations.cli.effects import refuse_idle
from fedrot.simulations.cli.root import app
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.grids import bundled_grids, read_grid


def grid_argument(entries: str) -> Any:
    """Return the argument for a grid: a file, or the name of a bundled grid, which shells complete."""
    bundled = bundled_grids(entries)
    help_text = (
        f"A grid, in place of the options: a TOML file with [base] and [[{entries}]] tables, or "
        f"the name of a bundled one: {', '.join(bundled)}."
    )

    def completed(incomplete: str) -> list[str]:
        return [name for name in bundled if name.startswith(incomplete)]

    return typer.Argument(help=help_text, autocompletion=completed)


#: The panels of the help of ``simulate``, each with its settings. Others are given by ``--set``.
PANELS = {
    "Data": (
        *("data", "task", "data_dir", "text_column", "label_column", "label_kind", "missing"),
        *("train_limit", "test_limit"),
    ),
    "Model": ("model", "architecture", "max_length", "starts", "lora"),
    "Federation": ("clients", "partition", "arms", "seeds", "rounds"),
    "Training": ("local_epochs", "batch_size", "lr"),
}
#: The settings of ``simulate`` that are no options of their own.
MORE_SETTINGS = tuple(
    name for name in SimulationConfig.model_fields if name not in {"setting"}.union(*PANELS.values())
)

#: Modules of the extra ``simulation`` that a run needs: a missing one is named before the run.
SIMULATION = (
    *("flwr", "flwr_datasets", "datasets", "transformers", "tokenizers", "pyarrow", "sklearn", "PIL"),
    *("nervaluate", "pandas", "matplotlib", "jinja2", "ray"),
)

# Parameters of several commands
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, run nothing.")]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Number of processes, one thread each; default: one per core.")
]
RayAddress = Annotated[
    str, typer.Option("--ray", help="Address of a Ray cluster; jobs run there, not on this machine.")
]
Gpus = Annotated[
    float, typer.Option(min=0, help="GPUs per job: a fraction such as 0.5, or a whole number.")
]
MoreSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help=f"Another setting of grids; can be repeated. One of {', '.join(MORE_SETTINGS)}.",
    ),
]
Quick = Annotated[bool, typer.Option("--quick", help="Run the grid's small variant: some minutes.")]
GridData = Annotated[Path | None, typer.Option(help="Overrides data_dir of the grid.")]


@command(
    app,
    "fedrot simulate --out runs/first",
    "fedrot simulate --out runs/mine --data mine.csv --seeds 5 --dry-run",
    "fedrot simulate rounds --data-dir data --out runs/grid --quick",
    fields=SimulationConfig,
    renamed={"starts": "--start"},
    leave_out=("setting", *MORE_SETTINGS),
    panels=PANELS,
    advice={f"--{name.replace('_', '-')}": f"--set {name}=VALUE" for name in MORE_SETTINGS},
)
def simulate(
    grid: Annotated[Path | None, grid_argument("setting")] = None,
    *,
    out: Annotated[Path, typer.Option(help="Folder for results; finished cells are skipped.")],
    settings: dict[str, Any],
    more: MoreSettings = None,
    workers: Workers = None,
    ray: RayAddress = "",
    gpus: Gpus = 0.0,
    quick: Quick = False,
    dry_run: DryRun = False,
) -> None:
    """Compare aligned with plain averaging: one setting from the options, or a grid of settings.

    Jobs run in parallel, one per core. A job runs all arms of one setting, start and seed. An arm that
    fails does not stop the others. To resume after an interrupt, repeat the command.
    """
    need(*SIMULATION)
    if grid is not None:
        data_dir, model = settings["data_dir"], settings["model"]
        configs = configs_of(grid, quick=quick, data_dir=data_dir, model=model)
    else:
        if "arms" not in given(click.get_current_context()):
            del settings["arms"]  # The default depends on other settings: adapters have other arms.
        configs = [SimulationConfig.from_flat({**settings, **_more_settings(more, settings)})]
    # After the settings have been checked: these modules import torch and transformers.
    from fedrot.simulations.federation.grid_run import simulate as run
    from fedrot.simulations.jobs import Machine

    run(configs, out, command_line(), console, Machine(workers, ray, gpus), dry_run=dry_run)


def _more_settings(given: Iterable[str] | None, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of ``--set``; refuse what has no effect beside the others."""
    found = dict[str, str]()
    for entry in given or ():
        name, is_set, value = entry.partition("=")
        name = name.strip().replace("-", "_")
        if not is_set or name not in MORE_SETTINGS or name in found:
            raise ValueError(
                f"--set {entry}: give NAME=VALUE, each name once; one of {', '.join(MORE_SETTINGS)}"
            )
        found[name] = value.strip()
    defaults = {name: field.default for name, field in SimulationConfig.model_fields.items()}
    values = {**defaults, **settings, **found, "grid": None}
    refuse_idle("simulate", values, {name: f"--set {name}" for name in found})
    return found


def configs_of(
    grid: Path, *, quick: bool, data_dir: Path | None, model: str | None
) -> list[SimulationConfig]:
    """Return the configurations of a grid; ``data_dir`` and ``model`` replace its own unless None."""
    settings: dict[str, Any] = {"data_dir": data_dir, "model": model}
    beside = {name: value for name, value in settings.items() if value is not None}
    described = read_grid(grid, "setting", quick=quick)
    if not described:
        raise ValueError(f"'{grid}' has no [[setting]]; write at least one.")
    configs = [SimulationConfig.from_flat({**setting, **beside}) for setting in described]
    named = [config.setting for config in configs]
    if len(set(named)) != len(named):
        raise ValueError(f"Two settings have the same name among {named}; give each another 'setting'.")
    return configs


@command(app, "fedrot flower-app my-app", name="flower-app")
def flower_app(
    folder: Annotated[Path, typer.Argument(help="A new folder for the app's pyproject.toml.")],
) -> None:
    """Write a Flower app that runs a comparison in your own federation, with flwr run."""
    source = resources.files("fedrot.simulations") / "flower_app" / "pyproject.toml"
    if folder.exists():
        raise FileExistsError(f"'{folder}' exists already. Choose a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as temporary:
        temporary.mkdir()
        (temporary / "pyproject.toml").write_bytes(source.read_bytes())
    say(f"Flower app: {folder}")


@command(
    app,
    "fedrot report runs/first --markdown results.md",
    "fedrot report alignment.jsonl --out alignment.html",
)
def report(
    run_or_file: Annotated[
        Path, typer.Argument(help="A run folder, or the rows file that a strategy wrote.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="For a file: path of the page; default: that file's, with .html.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(help="For a folder: also write the tables of results to this Markdown file."),
    ] = None,
) -> None:
    """Write the HTML report of a run folder, complete or not, or of a strategy's rows file."""
    from fedrot.simulations.federation import runner
    from fedrot.simulations.federation.run_folder import ROWS
    from fedrot.simulations.report.run_page import markdown_report
    from fedrot.simulations.report.strategy_page import write_strategy_report

    if run_or_file.is_file():
        page = write_strategy_report(run_or_file, out)
        say(f"Report: {page}")
        return
    if not (run_or_file / ROWS).is_file():
        raise ValueError(f"'{run_or_file}' is not a run folder: it has no {ROWS}.")
    runner.present(run_or_file, console)
    if markdown is not None:
        write_text(markdown, markdown_report(run_or_file))
