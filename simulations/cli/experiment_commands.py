"""Commands for experiments: simulate, flower-app, report."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fedrot._io import replacing
from fedrot.errors import FedrotError
from fedrot.simulations.cli.commands import (
    Function,
    app,
    command,
    command_line,
    console,
    refuse_taken,
)
from fedrot.simulations.experiment import Experiment, read_experiments

#: The name of ``--set`` for the address of a Ray cluster.
RAY = "ray"

#: Fields of an experiment that have an option of their own; ``--set`` takes all others.
_FIELDS = (
    "data data_dir text_column label_column task model clients partition strategies "
    "seeds rounds"
)


def _with_fields(function: Function) -> Function:
    """Give a command an option for each of ``_FIELDS`` behind ``out``.

    It takes them as keywords.
    """
    file, out, *others, _ = signature(function, eval_str=True).parameters.values()
    options = []
    for name in _FIELDS.split():
        field = Experiment.model_fields[name]
        kind: Any = field.annotation if field.annotation in (int, Path | None) else str
        options.append(
            out.replace(
                name=name,
                default=None,
                annotation=Annotated[kind | None, Option(help=field.description)],
            )
        )
    function.__dict__["__signature__"] = Signature([file, out, *options, *others])
    return function


# Arguments are hidden, and docstrings describe them: some versions of click drop their
# help.
_SET = "Any other setting (docs/reference/settings.md); repeatable."


@command(
    app,
    "fedrot simulate --data mine.csv --label-column mood --out runs/mine",
    "fedrot simulate demo --seeds 1 --out runs/demo",
)
@_with_fields
def simulate(
    file: Annotated[Path | None, Argument(hidden=True)] = None,
    *,
    out: Annotated[
        Path, Option(help="Folder for results; what it has is not run again.")
    ],
    workers: Annotated[
        int | None, Option(min=1, help="Processes; default: one per core.")
    ] = None,
    save: Annotated[
        Path | None, Option(help="A new folder for the recommended model.")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Check everything, run nothing.")
    ] = False,
    settings: Annotated[
        list[str] | None, Option("--set", metavar="NAME=VALUE", help=_SET)
    ] = None,
    **fields: Any,
) -> None:
    """Which average helps on your data? Trains clients, and compares strategies.

    FILE is a TOML file of experiments, or a bundled one, such as demo; options replace
    its values. Without it: one experiment from the options. Repeat the command to go on
    after an interrupt.
    """
    values = {name: value for name, value in fields.items() if value is not None}
    _add_settings(values, settings or ())
    ray = values.pop(RAY, "")
    if file:
        experiments = read_experiments(file, values)
    else:
        experiments = [Experiment.from_flat(values)]
    refuse_taken(save, "--save")
    if save:
        served, results = save.resolve(), out.resolve()
        if served.is_relative_to(results) or results.is_relative_to(served):
            raise FedrotError(
                f"--save '{save}' and --out '{out}' are one folder, or one is inside "
                "of the other. Choose another --save."
            )
        if len(experiments) > 1:
            raise FedrotError(
                f"--save writes one model, but '{file}' has {len(experiments)} "
                "experiments. Leave it out."
            )
    # After the settings have been checked: these modules import torch and transformers.
    from fedrot.simulations.engine import Machine
    from fedrot.simulations.simulate import simulate as run

    run(
        experiments,
        out,
        command_line(),
        console,
        Machine(workers, ray),
        save=save,
        dry_run=dry_run,
    )


def _add_settings(values: dict[str, Any], settings: Iterable[str]) -> None:
    """Add the fields of ``--set``."""
    known = [*Experiment.model_fields, RAY]
    for entry in settings:
        name, is_set, value = (part.strip() for part in entry.partition("="))
        name = name.replace("-", "_")
        if not is_set or name not in known:
            raise ValueError(
                f"--set {entry}: give NAME=VALUE; names are {', '.join(known)}"
            )
        if name in values:
            raise ValueError(f"--set {entry}: '{name}' is given twice")
        values[name] = value


@command(app, "fedrot flower-app my-app")
def flower_app(folder: Annotated[Path, Argument(hidden=True)]) -> None:
    """Write a Flower app to a new FOLDER; it runs a comparison in your own federation,
    with flwr run.
    """
    source = resources.files("fedrot.simulations") / "flower_app" / "pyproject.toml"
    if folder.exists():
        raise FileExistsError(f"'{folder}' exists already. Choose a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing(folder) as temporary:
        temporary.mkdir()
        (temporary / "pyproject.toml").write_bytes(source.read_bytes())
    console.print(f"Flower app: {folder}")


@command(
    app,
    "fedrot report runs/first",
    "fedrot report alignment.jsonl --verify runs/tuesday",
    "fedrot report alignment.jsonl --client 7",
    "fedrot report answers.jsonl",
)
def report(
    run_or_file: Annotated[Path, Argument(hidden=True)],
    verify: Annotated[
        Path | None, Option(help="Checkpoints, to compare with hashes.")
    ] = None,
    client: Annotated[
        str | None, Option(help="A client, to list rounds with its updates.")
    ] = None,
) -> None:
    """Write the page of a run folder, or of a strategy's file of rows; or verify
    checkpoints; or list the rounds of a client, or the answers in a client's record.
    """
    from fedrot.simulations.report.answers_table import answers_table, is_record
    from fedrot.simulations.report.client_updates import rounds_of
    from fedrot.simulations.report.hashes import verified
    from fedrot.simulations.report.pages import present, write_strategy_report

    if client is not None:
        console.print(rounds_of(client, run_or_file))
    elif verify is not None:
        console.print(verified(run_or_file, verify))
    elif run_or_file.is_file() and is_record(run_or_file):
        console.print(answers_table(run_or_file))
    elif run_or_file.is_file():
        console.print(f"Report: {write_strategy_report(run_or_file)}")
    else:
        present(run_or_file, console)
