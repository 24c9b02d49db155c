"""The ``fedrot`` command line."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

import fedrot
from fedrot.simulations.barrier.barrier_methods import BarrierSettings
from fedrot.simulations.cli.commands import (
    FAILED,
    command,
    command_line,
    complain_in_red,
    console,
    examples,
    names,
    say,
)
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation import runner
from fedrot.simulations.grids import bundled_grids, read_grid
from fedrot.simulations.merge.merge_inputs import MergeSettings
from fedrot.simulations.port.porting import PortSettings

app = typer.Typer(
    no_args_is_help=True, add_completion=False, epilog=examples("fedrot simulate --out runs/first")
)


def _grid_help(entries: str) -> str:
    bundled = ", ".join(bundled_grids(entries))
    return f"TOML file: [base] and one [[{entries}]] each; or a bundled one: {bundled}."


# Parameters of several commands
NewRun = Annotated[Path, typer.Option(help="Folder for results; must not hold a run yet.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, run nothing.")]
GridData = Annotated[Path | None, typer.Option(help="Overrides data_dir of the grid.")]


def main() -> None:
    """Entry point of the command line."""
    runner.prepare_environment()
    app()


def _version(asked: bool) -> None:
    if asked:
        say(f"fedrot {fedrot.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Aligned federated averaging of transformers, compared with plain averaging."""


@command(
    app,
    "fedrot simulate --out runs/first",
    "fedrot simulate --out runs/skewed --partition dirichlet:0.5 --seeds 5",
    "fedrot simulate --out runs/mine --data mine.csv --dry-run",
    fields=SimulationConfig,
    renamed={"starts": "--start"},
    leave_out=("setting",),
)
def simulate(
    out: NewRun,
    settings: dict[str, Any],
    first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    gpus: Annotated[
        float, typer.Option(min=0, help="GPUs per client: a share of one, such as 0.5, or whole ones.")
    ] = 0.0,
    dry_run: DryRun = False,
) -> None:
    """Compare aligned with plain averaging in Flower's simulation engine."""
    _simulate([{**settings, "first_seed": first_seed}], out, gpus=gpus, dry_run=dry_run)


@command(app, "fedrot compare one-shot --data-dir data --out runs/grid")
def compare(
    grid: Annotated[Path, typer.Argument(help=_grid_help("setting"))],
    out: NewRun,
    data_dir: GridData = None,
    model: Annotated[str | None, typer.Option(help="Overrides model of the grid.")] = None,
    dry_run: DryRun = False,
) -> None:
    """Run a grid of settings, each with its arms, starts and seeds."""
    options = {"data_dir": data_dir, "model": model}
    given = {key: value for key, value in options.items() if value is not None}
    base, entries = read_grid(grid, "setting")
    if not entries:
        raise ValueError(f"'{grid}' describes no [[setting]].")
    _simulate([{**base, **entry, **given} for entry in entries], out, dry_run=dry_run)


def _simulate(settings: list[dict[str, Any]], out: Path, **how: Any) -> None:
    configs = [SimulationConfig.from_flat(setting) for setting in settings]
    named = [config.setting for config in configs]
    if len(set(named)) != len(named):
        raise ValueError(f"Two settings have one name among {named}; give each a setting of its own.")
    if not runner.simulate(configs, out, command_line(), console, **how):
        raise KeyboardInterrupt


@command(app, "fedrot flower-app my-app", name="flower-app")
def flower_app(
    folder: Annotated[Path, typer.Argument(help="A new folder for the app's pyproject.toml.")],
) -> None:
    """Write the Flower app that runs a comparison in a federation of your own by flwr run."""
    source = resources.files("fedrot.simulations") / "flower_app" / "pyproject.toml"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_bytes(source.read_bytes())
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
        Path | None, typer.Option(help="Of a file: the page; default: beside it, with .html.")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Of a file: its metrics_path; default: metrics.jsonl beside it.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(help="Of a folder: also write the tables of results to this Markdown file."),
    ] = None,
) -> None:
    """Rebuild the HTML report of a run folder, complete or not, or write that of a strategy's file."""
    from fedrot.simulations.federation.run_folder import read_alignment, read_rows, rows_file
    from fedrot.simulations.report.shares import share_table
    from fedrot.simulations.report.strategy_page import write_strategy_report
    from fedrot.simulations.report.tables import markdown_table

    if run_or_file.is_file():
        page = write_strategy_report(run_or_file, out, metrics)
        found = share_table(read_rows(run_or_file.parent, run_or_file.name))
        if found is not None:
            console.print(found.terminal())
        say(f"Report: {page}")
        return
    if rows_file(run_or_file) is None:
        raise ValueError(f"'{run_or_file}' is not a run folder: it has no rows.jsonl.")
    runner.present(run_or_file, console)
    if markdown is not None:
        found = share_table(read_alignment(run_or_file))
        tables = [markdown_table(read_rows(run_or_file)), *([found.markdown()] if found else [])]
        markdown.write_text("\n".join(tables), encoding="utf-8")


@command(
    app,
    "fedrot barrier models/a models/b --out runs/barrier --methods vanilla,whole",
    fields=BarrierSettings,
)
def barrier(
    a: Annotated[Path, typer.Argument(help="Folder of a model saved with save_pretrained.")],
    b: Annotated[Path, typer.Argument(help="Folder of another one, which is moved to the first.")],
    out: Annotated[Path, typer.Option(help="Folder for results; must be empty or new.")],
    settings: dict[str, Any],
) -> None:
    """Measure the loss along the line between two saved models, matched in every way."""
    from fedrot.simulations.barrier.barrier_run import compare_saved_models

    compare_saved_models(a, b, out, BarrierSettings(**settings), command_line(), console)


@command(app, "fedrot barriers barriers --data-dir data --out runs/pairs")
def barriers(
    grid: Annotated[Path, typer.Argument(help=_grid_help("task"))],
    out: Annotated[Path, typer.Option(help="Folder for results; what it holds is not done again.")],
    data_dir: GridData = None,
    only: Annotated[
        str | None, typer.Option(help="Cells or settings of the grid, separated by commas.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Instead of the grid's methods, separated by commas; see barrier --help."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, with one thread each.")] = 2,
) -> None:
    """Train pairs of small models and measure their barriers under every method of a grid."""
    from fedrot.simulations.barrier.barrier_grid import Grid, run_grid
    from fedrot.simulations.barrier.barrier_report import summarise, tables

    described = Grid.read(grid, data_dir)
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


@command(
    app,
    "fedrot merge models/a models/b --out models/merged",
    "fedrot merge models/a models/b --parts whole --dry-run",
    fields=MergeSettings,
)
def merge(
    models: Annotated[
        list[str],
        typer.Argument(help="Two or more: folders of saved models, .safetensors files or hub names."),
    ],
    *,
    out: Annotated[
        Path | None, typer.Option(help="A new folder, or a file if it ends in .safetensors.")
    ] = None,
    settings: dict[str, Any],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything but write.")] = False,
) -> None:
    """Align saved models to one of them, merge them, and write the result as a model."""
    from fedrot.simulations.merge.merging import merge as merge_models
    from fedrot.simulations.merge.merging import table

    with console.status(escape(f"{settings['method']} of {len(models)} models")):
        found = merge_models(models, out, MergeSettings(**settings), dry_run=dry_run)
    console.print(table(found))
    for note in found.notes:
        say(f"Note: {note}")
    say(f"Written: {found.out}" if found.out else "Dry run: nothing was written.")


@command(app, "fedrot canonical models/a models/a-canonical")
def canonical(
    model: Annotated[str, typer.Argument(help="Folder of a saved model, or a hub name.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
) -> None:
    """Write a pre-norm model whose norms are folded: the same function, a stream that can be rotated."""
    from fedrot.simulations.port.canonical_model import write_canonical

    with console.status(escape(f"Folding {model}")):
        found = write_canonical(model, out)
    say(f"Folded: {len(found.folded)} norms. The outputs change by {found.change:.1e} of their size.")
    if found.untied:
        say(f"Note: {' and '.join(found.untied)} were one table, and are two now.")
    say(f"Written: {out}")


@command(
    app,
    "fedrot port models/base models/tuned models/other-base --out models/ported",
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
    from fedrot.simulations.port.porting import port as carry

    with console.status(escape(f"Porting {tuned}")):
        found = carry(base, tuned, new_base, out, PortSettings(**settings))
    if found.matched is not None:
        how = "rotated" if found.rotated else "permuted"
        left = found.matched.after / max(found.matched.before, 1e-30)
        say(f"The residual stream was {how}. Of the bases' squared distance {left:.0%} is left.")
    if found.taken:
        say(f"Note: the bases lack {', '.join(found.taken)}; they were moved as a whole.")
    say(f"Written: {out}")


@command(app, "fedrot check models/a", "fedrot check --list")
def check(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a saved model, or a hub name; its class is loaded.")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(help="Parts such as attention+ffn, or whole; default: all that may move."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random elements, inputs and noise.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    list_families: Annotated[bool, typer.Option("--list", help="List the supported families.")] = False,
) -> None:
    """Move a model by random elements of its symmetry, and see whether its outputs stay what they are.

    Ends with 0 if they do, with 1 if not, and with 2 if the model cannot be checked.
    """
    from fedrot.simulations.check.checking import check_model, families_table, tables, verdict
    from fedrot.simulations.merge.merging import options_of
    from fedrot.symmetry import FAMILIES

    if list_families:
        if as_json:
            listed = {f.name: {"model_types": f.model_types, "stream": f.stream} for f in FAMILIES}
            typer.echo(json.dumps({"families": listed}))
        else:
            console.print(families_table(FAMILIES))
        return
    if model is None:
        raise ValueError("Give a model to check, or --list.")
    chosen = None if parts is None else options_of(parts).parts
    with nullcontext() if as_json else console.status(escape(f"Checking {model}")):
        found = check_model(model, chosen, seed)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        for table in tables(found):
            console.print(table)
        for part, reason in found.refused.items():
            say(f"Part '{part}' cannot be moved: {reason}")
        for note in found.notes:
            say(f"Note: {note}")
        (say if found.holds else complain_in_red)(verdict(found))
    if not found.holds:
        raise typer.Exit(FAILED)


@command(
    app,
    "fedrot diagnose models/base models/client-0 models/client-1",
    "fedrot diagnose runs/mine",
    "fedrot diagnose alignment.jsonl",
)
def diagnose(
    what: Annotated[
        list[str],
        typer.Argument(
            help="A run folder, or the rows file that a strategy wrote; or a base and the updates that "
            "were trained from it: folders of saved models, .safetensors files or hub names."
        ),
    ],
    *,
    config: Annotated[
        Path | None,
        typer.Option(help="Of .safetensors files: config.json, or a folder with one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say whether clients have turned against each other, and which average to take."""
    from fedrot.simulations.diagnose.diagnosing import diagnose_models, diagnose_run, tables

    with nullcontext() if as_json else console.status(escape(f"Diagnosing {what[0]}")):
        one = len(what) == 1
        found = diagnose_run(Path(what[0])) if one else [diagnose_models(what, config)]
    if as_json:
        typer.echo(json.dumps({"diagnoses": [each.to_dict() for each in found]}))
        return
    for each in found:
        for table in tables(each):
            console.print(table)
    for each in found:
        say(": ".join(filter(None, [each.title, each.diagnosis.sentence])))
