"""Runs of configurations through Flower's simulation engine, with checks before and progress."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console

from fedrot.errors import FedrotError
from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.federation.run_folder import (
    RunFolder,
    read_alignment,
    read_results,
    refuse_used,
)
from fedrot.simulations.jobs import keeping_sigterm

#: Set before Flower and Ray are imported: no telemetry, no update checks, no stray output.
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def prepare_environment() -> None:
    """Set the variables of ``ENVIRONMENT`` that are not set; call before importing Flower."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check(configs: Sequence[SimulationConfig]) -> None:
    """Load model, data and partitions of every configuration, and try the model on the data.

    Bad input fails here, before any run.
    """
    from fedrot.head import head_of
    from fedrot.simulations.arm import Arm
    from fedrot.simulations.models.architectures import pretrained_settings
    from fedrot.simulations.models.build import build_model, model_config
    from fedrot.simulations.tasks.task import task_of
    from fedrot.simulations.tasks.trial import check_head, check_held_out, check_labels, check_model
    from fedrot.symmetry import check_family, symmetry_of

    for config in configs:
        if config.moves and config.model is not None:
            # An unsupported family is refused before its tokenizer and weights are loaded.
            check_family(pretrained_settings(config.model))
        if "pretrained" in config.starts:
            first = task_of(config.pretraining.to_json())
            check_model(first, build_model(first.config, first.data, seed=0))
        task = task_of(config.to_json())
        check_labels(task)
        for seed in config.seeds:
            task.clients(seed)
        known = task.objective.diverged()
        arms = list(map(Arm.parse, config.arms))
        for arm in (arm for arm in arms if arm.chooses):
            check_held_out(task, arm)
        for arm in arms:
            if arm.guard and arm.guard not in known:
                listed = ", ".join(known)
                raise FedrotError(f"arm '{arm.name}': no metric '{arm.guard}' here; one of {listed}")
        check_head(task)
        model = build_model(config, task.data, seed=0)
        check_model(task, model)
        for arm in (arm for arm in arms if arm.fits_task_head):
            try:
                head_of(model.config, model.state_dict())
            except FedrotError as error:
                raise FedrotError(f"arm '{arm.name}': {error}") from error
        if config.moves:
            symmetry = symmetry_of(model_config(config, task.data), model.state_dict())
            for arm in filter(lambda arm: arm.align, arms):
                try:
                    arm.options.layer_indices(symmetry.layers)
                except FedrotError as error:
                    raise FedrotError(f"arm '{arm.name}': {error}") from error


def present(out: Path, console: Console) -> None:
    """Print the tables of a run folder and write its report."""
    from fedrot.simulations.report.findings.sentences import costs_of_scrambling, verdicts
    from fedrot.simulations.report.findings.shares import share_tables
    from fedrot.simulations.report.run_page import write_report
    from fedrot.simulations.report.summaries import metrics_in
    from fedrot.simulations.report.tables import result_tables

    rows = read_results(out)
    metrics = metrics_in(rows)
    for table in (*result_tables(rows), *share_tables(read_alignment(out))):
        console.print(table)
    headings = {
        "What scrambling the clients' coordinates cost:": costs_of_scrambling(rows, metrics),
        "Did alignment help?": verdicts(rows),
    }
    for heading, sentences in headings.items():
        if sentences:
            console.print(heading, style="bold")
            console.print(*(f"  {sentence}" for sentence in sentences), sep="\n", highlight=False)
    console.print(f"Report: {write_report(out)}")


def simulate(
    config: SimulationConfig,
    out: Path,
    command: str,
    console: Console,
    *,
    gpus: float = 0.0,
    dry_run: bool = False,
) -> bool:
    """Run a configuration in Flower's engine into the folder ``out``; return False if interrupted.

    An unfinished run of the same configuration goes on: its finished cells are skipped.

    Args:
        gpus: GPUs that the engine lends to each client: a share of one, or a whole number.
        dry_run: only check everything and print the partitions; nothing is run or written.

    Raises:
        FileExistsError: the folder holds another run, or a finished one.
        FedrotError: another run writes to the folder; data, partition or model cannot be used, or the
            machine has fewer GPUs.
        RuntimeError: a simulation failed; the finished part is in the folder.
    """
    from fedrot.simulations.federation.ordered_grid import Interrupted

    settings = [config.model_dump(mode="json")]
    if not dry_run:
        refuse_used(out, settings)
    check_gpus(gpus)
    check([config])
    print_partitions([config], console)
    if dry_run:
        console.print(
            f"Dry run: {len(config.cells())} cells (seed, start and arm); nothing was run or written."
        )
        return True
    folder = RunFolder(out, settings, command)
    missing = len(config.cells()) - folder.finished_cells
    if folder.finished_cells:
        console.print(f"{folder.finished_cells} of {len(config.cells())} cells are finished already.")
    complete = False
    try:
        with _interruptible() as stop, _progress(console, missing * config.rounds) as advance:
            _run(config, folder, stop, advance, gpus)
        complete = True
    except Interrupted:
        console.print(
            f"Interrupted; the finished part is in {out}. Repeat the command to go on.", style="yellow"
        )
    finally:
        folder.close(complete)
        present(out, console)
    return complete


def print_partitions(configs: Sequence[SimulationConfig], console: Console) -> None:
    """Print how the first seed divides the data of each setting."""
    from fedrot.simulations.report.tables import partition_table
    from fedrot.simulations.tasks.task import task_of

    for config in configs:
        task, seed = task_of(config.to_json()), config.seeds[0]
        for sentence in filter(None, (task.data.note, task.data.said)):
            console.print(sentence, highlight=False)
        names, _, counts = task.partition(seed)
        console.print(partition_table(counts, names, config.setting, seed))


def _run(
    config: SimulationConfig, folder: RunFolder, stop: threading.Event, advance: Any, gpus: float
) -> None:
    log_to(logging.FileHandler(folder.path / "flower.log", encoding="utf-8"))
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from fedrot.simulations.federation.client_app import app as client_app
    from fedrot.simulations.federation.experiment import run_cells
    from fedrot.simulations.federation.ordered_grid import Interrupted

    server_app = ServerApp()
    failure: list[BaseException] = []

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            run_cells(grid, config, folder, stop, advance)
        except BaseException as error:
            failure.append(error)
            raise

    try:
        with keeping_sigterm():
            run_simulation(server_app, client_app, config.clients, backend_config=backend_config(gpus))
    except Exception as error:
        cause = failure[0] if failure else error
        if isinstance(cause, Interrupted):
            raise cause from None
        raise RuntimeError(f"The simulation of setting '{config.setting}' failed: {cause}") from cause


def check_gpus(gpus: float) -> None:
    """Raise ``FedrotError`` if clients cannot have so many GPUs each."""
    import torch

    found = torch.cuda.device_count()
    if not (0 <= gpus <= 1 or (gpus > 1 and gpus.is_integer())):
        raise FedrotError(f"gpus is {gpus:g}; give a share of one GPU, such as 0.5, or a whole number.")
    if gpus > found:
        raise FedrotError(
            f"gpus is {gpus:g} for each client, but PyTorch finds {found or 'no'} GPU(s) on this "
            f"machine; {'give at most ' + str(found) if found else 'leave --gpus out'}."
        )


def backend_config(gpus: float) -> dict[str, Any]:
    """Return the engine's configuration for clients with one core and ``gpus`` GPUs each."""
    import torch

    found = torch.cuda.device_count() if gpus else 0
    return {
        "init_args": {
            "address": "local",  # Not a cluster that somebody else runs on this machine.
            "num_cpus": os.cpu_count() or 1,
            "num_gpus": found,
            "include_dashboard": False,
        },
        "client_resources": {"num_cpus": 1, "num_gpus": gpus},
    }


def log_to(handler: logging.Handler) -> None:
    """Send Flower's log to a handler alone; the console shows the progress."""
    logger = logging.getLogger("flwr")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Set an event at the first Ctrl-C or SIGTERM; the second one interrupts as usual."""
    stop, signals = threading.Event(), (signal.SIGINT, signal.SIGTERM)

    def interrupt(signum: int, frame: object) -> None:
        stop.set()
        if hasattr(signal, "alarm"):
            signal.alarm(0)  # At SIGTERM, Ray sets an alarm that aborts the process.
        for number in signals:
            signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Any]:
    text = rich.progress.TextColumn("{task.description}", markup=False)
    _, bar, _, remaining = rich.progress.Progress.get_default_columns()
    done, elapsed = rich.progress.MofNCompleteColumn(), rich.progress.TimeElapsedColumn()
    with rich.progress.Progress(text, bar, done, elapsed, remaining, console=console) as progress:
        task = progress.add_task("starting Flower's engine", total=total)

        def advance(description: str, server_round: int, rounds: int) -> None:
            shown = f"{description} · round {server_round}/{rounds}"
            progress.update(task, description=shown, advance=1 if server_round else 0)
            if not console.is_terminal:
                console.print(f"{description}: round {server_round}/{rounds}", highlight=False)

        yield advance
