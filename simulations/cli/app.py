"""The ``fedrot`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

import fedrot
from fedrot.simulations.barrier.barrier_methods import METHODS, check_methods
from fedrot.simulations.cli import actions
from fedrot.simulations.cli.terminal import (
    Command,
    command_line,
    complain_in_json,
    console,
    examples,
    guarded,
    names,
    say,
)
from fedrot.simulations.federation.runner import prepare_environment

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    epilog=examples("fedrot simulate --out runs/first"),
)


def main() -> None:
    """Entry point of the command line."""
    prepare_environment()
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


@app.command(
    cls=Command,
    epilog=examples(
        "fedrot simulate --out runs/first",
        "fedrot simulate --out runs/skewed --partition dirichlet:0.5 --seeds 5",
        "fedrot simulate --out runs/mine --data mine.csv --dry-run",
    ),
)
def simulate(
    out: Annotated[Path, typer.Option(help="Folder for results; must not hold a run yet.")],
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set: bundled, a name in --data-dir, a file (.parquet, .csv or .jsonl), a folder "
            "of images, or a hub name; default: goemotions_ekman, and digits for images."
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option(
            help="classification, mlm or clm (masked or causal language modelling of the texts), ner "
            "(named entities) or image (image classification)."
        ),
    ] = "classification",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with glue/, emotion/, ner/, images/ as Parquet files.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="Column with text, words or image.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column with the label or tags.")] = None,
    train_limit: Annotated[int | None, typer.Option(help="Use at most so many rows.")] = None,
    test_limit: Annotated[int | None, typer.Option(help="Test on at most so many rows.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Pretrained model, folder or hub name; default: a small one.")
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option(
            help="Of the small model: bert, gpt2, llama or vit; default: gpt2 for clm, vit for image, "
            "else bert."
        ),
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of the small model.")] = 2,
    width: Annotated[int, typer.Option(help="Hidden size of the small model.")] = 128,
    heads: Annotated[int, typer.Option(help="Attention heads of the small model.")] = 4,
    max_length: Annotated[int, typer.Option(help="Tokens per text.")] = 64,
    dropout: Annotated[float, typer.Option(help="Dropout of the small model.")] = 0.1,
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 4,
    partition: Annotated[
        str,
        typer.Option(help="iid, dirichlet:ALPHA, pathological:CLASSES, keyclass:SHARE or column:NAME."),
    ] = "iid",
    holdout: Annotated[float, typer.Option(help="Share of its data a client tests on.")] = 0.1,
    fraction_train: Annotated[float, typer.Option(help="Share of clients in a round.")] = 1.0,
    start: Annotated[
        str, typer.Option(help="Any of same, different, scrambled, separated by commas.")
    ] = "same",
    head: Annotated[str, typer.Option(help="Task heads start the same or different.")] = "same",
    arms: Annotated[
        str,
        typer.Option(
            help="plain, aligned, or PARTS[@ANCHOR] such as attention+ffn@global, each perhaps with "
            "/AGGREGATION such as aligned/regmean; ensemble, joined; separated by commas."
        ),
    ] = "plain,aligned",
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 3,
    first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    rounds: Annotated[int, typer.Option(help="Rounds of federated training.")] = 3,
    local_epochs: Annotated[float, typer.Option(help="Epochs per client and round.")] = 1,
    first_epochs: Annotated[
        float | None,
        typer.Option(help="Epochs of the first round, before clients meet."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 32,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay.")] = 0.01,
    gpus: Annotated[
        float, typer.Option(min=0, help="GPUs per client: a share of one, such as 0.5, or whole ones.")
    ] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, run nothing.")] = False,
) -> None:
    """Compare aligned with plain averaging in Flower's simulation engine."""
    settings = dict(locals())
    for name in ("out", "gpus", "dry_run"):
        del settings[name]
    settings["starts"] = settings.pop("start")
    guarded(lambda: actions.simulate([settings], out, gpus=gpus, dry_run=dry_run))


@app.command(
    cls=Command,
    epilog=examples(
        "fedrot compare experiments/one-shot.toml --data-dir data --out runs/grid",
    ),
)
def compare(
    grid: Annotated[Path, typer.Argument(help="TOML file: [base] and one [[setting]] each.")],
    out: Annotated[Path, typer.Option(help="Folder for results; must not hold a run yet.")],
    data_dir: Annotated[Path | None, typer.Option(help="Overrides data_dir of the grid.")] = None,
    model: Annotated[str | None, typer.Option(help="Overrides model of the grid.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, run nothing.")] = False,
) -> None:
    """Run a grid of settings, each with its arms, starts and seeds."""

    def run() -> None:
        from fedrot.simulations.config import read_grid

        options = {"data_dir": data_dir, "model": model}
        given = {key: value for key, value in options.items() if value is not None}
        base, entries = read_grid(grid, "setting")
        settings = [{**base, **setting, **given} for setting in entries]
        if not settings:
            raise ValueError(f"'{grid}' describes no [[setting]].")
        actions.simulate(settings, out, dry_run=dry_run)

    guarded(run)


@app.command(
    cls=Command,
    epilog=examples(
        "fedrot report runs/first --markdown results.md",
        "fedrot report alignment.jsonl --out alignment.html",
    ),
)
def report(
    run_or_file: Annotated[
        Path, typer.Argument(help="A run folder, or the report_path that a strategy wrote.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Of a file: the page; default: beside it, with .html.")
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Of a file: its metrics_path; default: metrics.jsonl beside it.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(help="Of a folder: also write the table of results to this Markdown file."),
    ] = None,
) -> None:
    """Rebuild the HTML report of a run folder, complete or not, or write that of a strategy's file."""

    def run() -> None:
        if run_or_file.is_file():
            from fedrot.simulations.report.strategy_page import write_strategy_report

            say(f"Report: {write_strategy_report(run_or_file, out, metrics)}")
            return
        actions.report_folder(run_or_file, markdown)

    guarded(run)


@app.command(
    cls=Command,
    epilog=examples(
        "fedrot barrier models/a models/b --out runs/barrier --methods vanilla,whole",
    ),
)
def barrier(
    a: Annotated[Path, typer.Argument(help="Folder of a model saved with save_pretrained.")],
    b: Annotated[Path, typer.Argument(help="Folder of another one, which is moved to the first.")],
    out: Annotated[Path, typer.Option(help="Folder for results; must be empty or new.")],
    data: Annotated[
        str | None, typer.Option(help="Data set, as for simulate; default: that of the task.")
    ] = None,
    task: Annotated[
        str, typer.Option(help="classification, mlm, clm, ner or image.")
    ] = "classification",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with glue/, emotion/ ... as Parquet files.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="Column with the text.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column with the label.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(help=f"Ways to match, separated by commas: {', '.join(METHODS)}; default: all."),
    ] = None,
    points: Annotated[int, typer.Option(help="Positions on the line; odd, to include the middle.")] = 21,
    rows: Annotated[int, typer.Option(help="Training rows for the methods that look at data.")] = 2048,
    test_limit: Annotated[int, typer.Option(help="Evaluate on at most so many held-out rows.")] = 1000,
    max_length: Annotated[int, typer.Option(help="Tokens per text.")] = 64,
) -> None:
    """Measure the loss along the line between two saved models, matched in every way."""
    settings = dict(locals())
    for name in ("a", "b", "out"):
        del settings[name]

    def run() -> None:
        from fedrot.simulations.barrier.barrier_run import compare_saved_models
        from fedrot.simulations.barrier.barrier_settings import BarrierSettings

        compare_saved_models(a, b, out, BarrierSettings(**settings), command_line(), console)

    guarded(run)


@app.command(
    cls=Command,
    epilog=examples(
        "fedrot barriers experiments/barriers.toml --data-dir data --out runs/pairs",
    ),
)
def barriers(
    grid: Annotated[Path, typer.Argument(help="TOML file: [base] and one [[task]] each.")],
    out: Annotated[Path, typer.Option(help="Folder for results; what it holds is not done again.")],
    data_dir: Annotated[Path | None, typer.Option(help="Overrides data_dir of the grid.")] = None,
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

    def run() -> None:
        from fedrot.simulations.barrier.barrier_grid import Grid, run_grid
        from fedrot.simulations.barrier.barrier_report import summarise, tables

        described = Grid.read(grid, data_dir)
        if only:
            described = described.only(names(only))
        if methods:
            described = described.model_copy(update={"methods": check_methods(names(methods))})
        try:
            lines = run_grid(described, out, command_line(), say, workers)
        except KeyboardInterrupt:
            say(f"Interrupted; what is done is in {out}. Repeat the command to go on.")
            raise
        for table in tables(summarise(lines)):
            console.print(table)
        console.print(f"Summary: {out / 'summary.md'}")

    guarded(run)


@app.command(
    cls=Command,
    epilog=examples(
        "fedrot merge models/a models/b --out models/merged",
        "fedrot merge models/a models/b --parts whole --dry-run",
    ),
)
def merge(
    models: Annotated[
        list[str],
        typer.Argument(help="Two or more: folders of saved models, .safetensors files or hub names."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="A new folder, or a file if it ends in .safetensors.")
    ] = None,
    anchor: Annotated[
        str | None, typer.Option(help="The model that the others are moved to; default: the first.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="mean, fisher, regmean or ot (pip install 'fedrot[ot]').")
    ] = "mean",
    parts: Annotated[
        str, typer.Option(help="What is aligned: whole, none, or parts such as attention+ffn.")
    ] = "attention+ffn",
    layers: Annotated[
        str, typer.Option(help="Aligned layers: all, first:N, last:N or indices such as 0,2.")
    ] = "all",
    weights: Annotated[
        str | None, typer.Option(help="One number per model, separated by commas; default: equal.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="RegMean's factor of off-diagonal entries.")] = 0.9,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; default: the anchor's.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Of .safetensors files: config.json, or a folder with one.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Texts for fisher, regmean and activations (whole): as for simulate."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with glue/, emotion/ ... as Parquet files.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="Column with the text.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Column with the label.")] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            help="Texts at most; default: 1024, and 256 for fisher, which takes a backward pass for "
            "each text and label."
        ),
    ] = None,
    max_length: Annotated[int, typer.Option(help="Tokens per text.")] = 64,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything but write.")] = False,
) -> None:
    """Align saved models to one of them, merge them, and write the result as a model."""
    settings = dict(locals())
    for name in ("models", "out", "dry_run"):
        del settings[name]

    def run() -> None:
        from fedrot.simulations.merge.merge_report import table
        from fedrot.simulations.merge.merge_settings import MergeSettings
        from fedrot.simulations.merge.merging import merge

        with console.status(escape(f"{method} of {len(models)} models")):
            report = merge(models, out, MergeSettings(**settings), dry_run=dry_run)
        console.print(table(report))
        for note in report.notes:
            say(f"Note: {note}")
        say(f"Written: {report.out}" if report.out else "Dry run: nothing was written.")

    guarded(run)


@app.command(cls=Command, epilog=examples("fedrot check models/a", "fedrot check --list"))
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

    def run() -> None:
        if list_families:
            actions.list_families(as_json)
        elif model is None:
            raise ValueError("Give a model to check, or --list.")
        else:
            actions.check(model, parts, seed, as_json)

    guarded(run, complain_in_json if as_json else None)
