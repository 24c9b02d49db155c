"""The run of a grid: its cells side by side, each with all of its clients in one process."""

from __future__ import annotations

import hashlib
import io
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from fedrot._io import read_json, write_json
from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig, Start
from fedrot.simulations.federation.grid_folder import CellRows, GridCell, GridFolder, cells_of
from fedrot.simulations.federation.local_grid import local_clients
from fedrot.simulations.federation.run_folder import note_partition
from fedrot.simulations.federation.runner import check, check_gpus, log_to, present, print_partitions
from fedrot.simulations.folder_lock import only_writer
from fedrot.simulations.jobs import Job, Machine, check_failures, noted_failure, run_jobs
from fedrot.simulations.tasks.task import task_of
from fedrot.strategies.flower_compat import outside_of_the_engine

#: What evaluating and merging once costs, in epochs of training; roughly.
_EVALUATION = 0.1
#: Folder of a run for trainings that unfinished cells share; an interrupted grid goes on with them.
_TRAININGS = "trainings"
#: File of the metrics of the initial model, in a folder of trainings.
_INITIAL = "initial.json"


def compare(
    configs: Sequence[SimulationConfig],
    out: Path,
    command: str,
    console: Console,
    machine: Machine,
    *,
    dry_run: bool = False,
) -> None:
    """Run the cells that the folder ``out`` does not have yet.

    Raises:
        FileExistsError, FedrotError: the folder holds something else, see ``GridFolder``, or another
            run writes to it; data, partition or model cannot be used; the machine has fewer GPUs, or
            there is no cluster.
        RuntimeError: cells failed; their tracebacks are in ``failures/``, and the others are finished.
        KeyboardInterrupt: the user stopped the run; finished cells are in the folder.
    """
    if not machine.address:
        check_gpus(machine.gpus)
    check(configs)
    print_partitions(configs, console)
    cells = cells_of(configs)
    if dry_run:
        console.print(f"Dry run: {len(cells)} cells (seed, start and arm); nothing was run or written.")
        return
    with only_writer(out):
        _fill(GridFolder(out, configs, command), configs, cells, console, machine)


def _fill(
    folder: GridFolder,
    configs: Sequence[SimulationConfig],
    cells: Sequence[GridCell],
    console: Console,
    machine: Machine,
) -> None:
    """Run the cells that a folder does not have, and write its report."""
    out, partitions = folder.path, _partitions(configs)
    folder.partitions(partitions)
    missing = [cell for cell in cells if not folder.finished(cell)]
    if len(missing) < len(cells):
        console.print(f"{len(cells) - len(missing)} of {len(cells)} cells are finished already.")
    complete = False
    try:
        failed = _run(missing, partitions, folder, console, machine)
        complete = not failed
    except KeyboardInterrupt:
        console.print(
            f"Interrupted; the finished cells are in {out}. Repeat the command to go on.", style="yellow"
        )
        raise
    finally:
        folder.close(complete)
        if any(map(folder.finished, cells)):
            present(out, console)
    check_failures(failed, len(missing), "cells", out)


def _run(
    cells: Sequence[GridCell],
    partitions: Mapping[str, Any],
    folder: GridFolder,
    console: Console,
    machine: Machine,
) -> int:
    """Run cells and write their rows as they come; return how many failed."""
    failed, done, start = 0, 0.0, perf_counter()
    trainings = folder.path / _TRAININGS
    unfinished = {cell.name: cell for cell in cells}
    jobs = _jobs(cells, partitions, trainings)
    left = sum(job.cost for job in jobs)
    for number, (job, outcome) in enumerate(run_jobs(jobs, machine), start=1):
        cell = unfinished[job.name]
        done, left = done + job.cost, left - job.cost
        said = noted_failure(folder.path, job.name, cell.title, outcome)
        if said:
            failed += 1
        else:
            rows, log = outcome.value
            folder.add(cell, rows, log)
            del unfinished[job.name]
            said = _last_metrics(rows)
        time = timedelta(seconds=round(left * (perf_counter() - start) / done))
        rest = f"; about {time} left" if number < len(cells) else ""
        console.print(f"[{number} of {len(cells)}] {cell.title}: {said}{rest}", highlight=False)
        if all(other.trains_first != cell.trains_first for other in unfinished.values()):
            shutil.rmtree(_cache(trainings, cell), ignore_errors=True)
    if not unfinished:
        shutil.rmtree(trainings, ignore_errors=True)
    return failed


def _jobs(cells: Sequence[GridCell], partitions: Mapping[str, Any], trainings: Path) -> list[Job]:
    """Return a job per cell: the first of those that share trainings goes first and keeps them."""
    first: dict[object, str] = {}
    jobs = []
    for cell in cells:
        cache, leader = _cache(trainings, cell), cell.name
        cache.mkdir(parents=True, exist_ok=True)
        if not cell.arm.joined:
            leader = first.setdefault(cell.trains_first, cell.name)
        arguments = (cell.config.to_json(), cell.seed, cell.start, cell.arm.name, str(cache))
        sizes = partitions[cell.config.setting]["seeds"][str(cell.seed)]["sizes"]
        after = "" if leader == cell.name else leader
        cost = _epochs(cell, first=not after) * sum(sizes)
        jobs.append(Job(cell.name, run_alone, arguments, cost, after))
    return jobs


def _cache(trainings: Path, cell: GridCell) -> Path:
    return trainings / hashlib.sha256(repr(cell.trains_first).encode()).hexdigest()[:16]


def _epochs(cell: GridCell, *, first: bool) -> float:
    """Return how much work a cell is, in epochs: its trainings, without a ``first`` one that is kept."""
    config = cell.config
    trained = range(1 if first else 2, config.rounds + 1)
    return sum(map(config.epochs, trained)) * config.fraction_train + _EVALUATION * config.rounds


def run_alone(config_json: str, seed: int, start: Start, arm: str, cache: str) -> tuple[CellRows, str]:
    """Run one cell with all of its clients in this process; return its rows and Flower's log."""
    from fedrot.simulations.federation.arm_strategies import ArmRun
    from fedrot.simulations.federation.client_app import app
    from fedrot.simulations.federation.experiment import run_cell
    from fedrot.simulations.federation.ordered_grid import OrderedGrid

    torch.set_num_threads(1)
    task, rows, known = task_of(config_json), CellRows(), Path(cache) / _INITIAL
    initial = read_json(known) if known.exists() else {}
    cell = ArmRun(task, seed, start, Arm.parse(arm), rows, lambda *_: None, initial)
    count = task.config.clients
    with ExitStack() as stack:
        log = stack.enter_context(_logged())
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="fedrot-", ignore_cleanup_errors=True)
        )
        stack.enter_context(outside_of_the_engine())
        grid = OrderedGrid(local_clients(app, count), threading.Event(), count)
        run_cell(cell, grid, Path(scratch), cache)
    if known.parent.is_dir() and not known.exists():  # Other machines of a cluster lack the folder.
        write_json(known, initial)
    return rows, log.getvalue()


@contextmanager
def _logged() -> Iterator[io.StringIO]:
    """Collect Flower's log inside of the context."""
    logger, log = logging.getLogger("flwr"), io.StringIO()
    before, propagate = list(logger.handlers), logger.propagate
    log_to(logging.StreamHandler(log))
    try:
        yield log
    finally:
        logger.handlers[:], logger.propagate = before, propagate


def _last_metrics(found: CellRows) -> str:
    """Return the metrics of the last round's model as text."""
    central = [row for row in found.rows if row["scope"] == "central"]
    last = max(row["round"] for row in central)
    return ", ".join(f"{row['metric']} {row['value']:.3f}" for row in central if row["round"] == last)


def _partitions(configs: Sequence[SimulationConfig]) -> dict[str, Any]:
    """Return names of classes, sizes and counts of all clients, by setting and seed."""
    found: dict[str, Any] = {}
    for config in configs:
        for seed in config.seeds:
            note_partition(found, config.setting, seed, *task_of(config.to_json()).partition(seed))
    return found
