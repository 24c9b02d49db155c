"""``simulate``: runs the missing cells of a run, in jobs that share their clients' trainings."""

from __future__ import annotations

import gc
import io
import logging
import math
import shutil
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.text import Text

from fedrot.simulations.arm import Arm
from fedrot.simulations.config import SimulationConfig, Start
from fedrot.simulations.federation.experiment import PROGRESS
from fedrot.simulations.federation.local_grid import local_clients
from fedrot.simulations.federation.run_folder import CENTRAL
from fedrot.simulations.federation.runner import check, check_gpus, log_to, present, print_partitions
from fedrot.simulations.federation.store import (
    Cell,
    CellRows,
    RunFolder,
    cells_of,
    identity_of,
    partitions_of,
    write_cell,
)
from fedrot.simulations.folder_lock import only_writer
from fedrot.simulations.jobs import Job, Machine, check_failures, noted_failure, run_jobs
from fedrot.simulations.report.summaries import headline
from fedrot.simulations.tasks.task import task_of
from fedrot.strategies.flower_compat import outside_of_the_engine

#: Approximate cost of one evaluation and merge, in epochs of training.
_EVALUATION = 0.1
#: Folder in a run folder for the shared trainings of running jobs.
_TRAININGS = "trainings"

#: A cell that can be pickled: configuration as JSON, seed, start and the name of its arm.
Told: TypeAlias = tuple[str, int, Start, str]


def simulate(
    configs: Sequence[SimulationConfig],
    out: Path,
    command: str,
    console: Console,
    machine: Machine,
    *,
    dry_run: bool = False,
) -> None:
    """Run the cells that the folder ``out`` does not have yet.

    Args:
        dry_run: only check the input and print the partitions; nothing is run or written.

    Raises:
        FileExistsError, FedrotError: the folder has other contents, see ``RunFolder``, or another run
            writes to it; data, partition or model cannot be used; the machine has too few GPUs; or there
            is no cluster.
        RuntimeError: cells failed; their tracebacks are in ``failures/``, and the others are finished.
        KeyboardInterrupt: the user stopped the run; finished cells are in the folder.
    """
    if not machine.address:
        check_gpus(machine.gpus)
    check(configs)
    print_partitions(configs, console, brief=not dry_run)
    cells = cells_of(configs)
    if dry_run:
        console.print(f"Dry run: {len(cells)} cells (seed, start and arm); nothing was run or written.")
        return
    with only_writer(out):
        _fill(RunFolder(out, configs, command), configs, cells, console, machine)


def _fill(
    store: RunFolder,
    configs: Sequence[SimulationConfig],
    cells: Sequence[Cell],
    console: Console,
    machine: Machine,
) -> None:
    """Run the cells that a folder lacks, and write its report."""
    out, partitions = store.path, partitions_of(configs)
    store.partitions(partitions)
    missing = [cell for cell in cells if not store.finished(cell)]
    if len(missing) < len(cells):
        console.print(f"{len(cells) - len(missing)} of {len(cells)} cells are finished already.")
    run, complete = _Run(store, missing, partitions, console), False
    try:
        with console.status("") as run.progress:
            run.finish(machine)
        complete = not run.failed
    except KeyboardInterrupt:
        console.print(
            f"Interrupted; {sum(map(store.finished, cells))} of {len(cells)} cells are finished, in "
            f"{out}. Repeat the command to resume.",
            style="yellow",
        )
        raise
    finally:
        shutil.rmtree(out / _TRAININGS, ignore_errors=True)
        store.close(complete)
        if any(map(store.finished, cells)):
            present(out, console, brief=True)
    check_failures(run.failed, len(missing), "cells", out)


class _Run:
    """The run of the cells that a folder lacks. Each finished cell has a line on the console.

    ``failed`` is the number of failed cells. On a terminal, the line of the last cell is ``progress``,
    followed by the last rounds of running cells.
    """

    def __init__(
        self, store: RunFolder, cells: Sequence[Cell], partitions: Mapping[str, Any], console: Console
    ) -> None:
        self.store, self.console, self.progress = store, console, console.status("")
        self.failed, self._count = 0, len(cells)
        self._untried = {cell.name: cell for cell in cells}
        self._costs = _costs(cells, partitions)
        self._start, self._cost = perf_counter(), sum(self._costs.values())
        self._last = "The first cells run."

    def finish(self, machine: Machine) -> None:
        """Run all cells. If a process dies, its current cell fails and its later cells are run again."""
        trainings = self.store.path / _TRAININGS
        while self._untried:
            shutil.rmtree(trainings, ignore_errors=True)  # Left by a process that was killed.
            trainings.mkdir()
            jobs = self._jobs()
            with closing(run_jobs([*jobs], machine, self._look)) as ended:
                for job, outcome in ended:
                    for name, rows, log, failure in outcome.parts:
                        if failure:
                            self._fail(self._untried[name], failure)
                        elif name in self._untried:
                            self.store.add(self._untried[name], rows, log)
                    self._look()
                    left = [cell for cell in jobs[job] if cell.name in self._untried]
                    for cell in left[: 1 if outcome.died else None]:
                        self._fail(cell, outcome.failure)

    def _jobs(self) -> dict[Job, list[Cell]]:
        """Return the jobs, the longest first; one job for cells that share their first trainings."""
        groups = defaultdict[object, list[Cell]](list)
        for cell in self._untried.values():
            groups[cell.trains_first].append(cell)
        found = {}
        for cells in groups.values():
            told = tuple((c.config.to_json(), c.seed, c.start, c.arm.name) for c in cells)
            arguments = (told, self.store.path.absolute(), identity_of(self.store.path))
            cost = sum(self._costs[cell.name] for cell in cells)
            found[Job(cells[0].name, run_job, arguments, cost)] = cells
        return dict(sorted(found.items(), key=lambda pair: -pair[0].cost))

    def _look(self) -> None:
        """Publish the cells that were finished since the last call, and print their lines."""
        for cell in [cell for cell in self._untried.values() if self.store.finished(cell)]:
            rows = [row for row in self.store.publish(cell) if row["scope"] == CENTRAL]
            at_end = (row for row in rows if row["round"] == cell.config.rounds)
            last = {r["metric"]: math.nan if r["value"] is None else r["value"] for r in at_end}
            noted_failure(self.store.path, cell.name, cell.title, "")
            self._tell(cell, ", ".join(f"{name} {last[name]:.3f}" for name in headline(rows)))
        if self.console.is_terminal:
            self._show_progress()

    def _show_progress(self) -> None:
        running = []
        for file in sorted((self.store.path / _TRAININGS).glob(f"*/{PROGRESS}")):
            with suppress(FileNotFoundError):  # The cell's job has ended.
                running.append(file.read_text(encoding="utf-8"))
        self.progress.update(Text("\n".join([self._last, *running])))

    def _fail(self, cell: Cell, failure: str) -> None:
        self.failed += 1
        self._tell(cell, noted_failure(self.store.path, cell.name, cell.title, failure), failed=True)

    def _tell(self, cell: Cell, said: str, failed: bool = False) -> None:
        del self._untried[cell.name]
        left = sum(self._costs[name] for name in self._untried)
        time = timedelta(seconds=round(left * (perf_counter() - self._start) / (self._cost - left)))
        rest = f"; about {time} left" if self._untried else ""
        number = self._count - len(self._untried)
        line = f"[{number} of {self._count}] {cell.title}: {said}{rest}"
        if self.console.is_terminal and not failed:
            self._last = line
        else:
            self.console.print(line, highlight=False)


def _costs(cells: Sequence[Cell], partitions: Mapping[str, Any]) -> dict[str, float]:
    """Return the cost of each cell, by name: rows times epochs.

    Of cells that share the first round's trainings, only the first has their cost.
    """
    found, trained = {}, set[object]()
    for cell in cells:
        config, key = cell.config, cell.trains_first
        epochs = config.epochs(1) if cell.arm.joined or key not in trained else 0.0
        epochs += sum(map(config.epochs, range(2, config.rounds + 1)))
        sizes = partitions[config.setting]["seeds"][str(cell.seed)]["sizes"]
        work = epochs * config.fraction_train + _EVALUATION * config.rounds
        found[cell.name] = work * sum(sizes)
        trained |= set() if cell.arm.joined else {key}
    return found


def run_job(told: Sequence[Told], out: Path, identity: str) -> Iterator[tuple[str, CellRows, str, str]]:
    """Run cells that share the trainings of their clients, with all clients in this process.

    Yield the name of each cell, its rows, Flower's log, and its traceback, empty if it did not fail. If
    ``out`` on this machine is the run folder (see ``identity_of``), finished cells are written there.
    """
    from fedrot.simulations.federation.client_app import app
    from fedrot.simulations.federation.experiment import run_cells
    from fedrot.simulations.federation.ordered_grid import OrderedGrid

    torch.set_num_threads(1)
    cells = [
        Cell(task_of(config).config, seed, start, Arm.parse(arm)) for config, seed, start, arm in told
    ]
    here, clients = identity_of(out) == identity, cells[0].config.clients
    # Modules and data stay: a collection after each cell need not look at them.
    gc.collect()
    gc.freeze()
    with ExitStack() as stack:
        log = stack.enter_context(_logged())
        stack.enter_context(outside_of_the_engine())
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="fedrot-", dir=out / _TRAININGS if here else None, ignore_cleanup_errors=True
            )
        )
        grid = OrderedGrid(local_clients(app, clients), clients)
        for cell, rows, error in run_cells(cells, grid, Path(scratch), shared_cache=True):
            failure = "".join(traceback.format_exception(error)) if error else ""
            if here and not failure:
                write_cell(out, cell, rows, log.getvalue())
            yield cell.name, rows, log.getvalue(), failure
            log.seek(0)
            log.truncate()


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
