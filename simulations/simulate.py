"""``simulate``: runs what a run folder lacks, in jobs that share their clients'
trainings.
"""

from __future__ import annotations

import gc
import io
import logging
import math
import os
import shutil
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedrot.simulations.checks import checked, costs_of, estimate, in_words
from fedrot.simulations.engine import Ended, Job, Machine, Tell, run_jobs
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation.cells import run_cell
from fedrot.simulations.federation.client_app import app
from fedrot.simulations.federation.grids import OrderedGrid, local_clients
from fedrot.simulations.report.pages import present
from fedrot.simulations.run_folder import Cell, RunFolder, cells_of, only_writer
from fedrot.simulations.tasks import training
from fedrot.strategies.wire.flower_compat import outside_of_the_engine

#: Folder of shared trainings of running jobs, in a run folder.
TRAININGS = "trainings"
#: Seconds between two lines about the progress, where there is no terminal.
SILENCE = 30.0
#: Seconds between two reports of a job about its progress.
_BEAT = 0.5


def simulate(
    experiments: Sequence[Experiment],
    out: Path,
    command: str,
    console: Console,
    machine: Machine,
    *,
    dry_run: bool = False,
) -> None:
    """Run what the folder ``out`` does not have yet.

    Args:
        dry_run: only check the input, and print what is known before a run; nothing is
            written.

    Raises:
        FileExistsError, FedrotError: the folder has other contents, see ``RunFolder``,
            or another run writes to it; data, partition or model cannot be used; or
            there is no cluster.
        RuntimeError: a part failed; their tracebacks are in ``cells/``, and the others
            are finished.
        KeyboardInterrupt: the user stopped the run; what is finished is in the folder.
    """
    with _logged():
        known = {experiment.name: checked(experiment) for experiment in experiments}
    for sentence in dict.fromkeys(
        said for own in known.values() for said in own.said if said
    ):
        console.print(sentence, highlight=False)
    cells = cells_of(experiments)
    costs = costs_of(cells, known)
    if dry_run:
        console.print(estimate(cells, costs, known, machine), highlight=False)
        console.print("Dry run: nothing was run or written.")
        return
    with only_writer(out):
        folder = RunFolder(
            out, {name: own.described for name, own in known.items()}, command
        )
        missing = [cell for cell in cells if not folder.has(cell)]
        if len(missing) < len(cells):
            console.print(
                f"{len(cells) - len(missing)} of {len(cells)} results are there "
                "already."
            )
        if missing:
            console.print(estimate(missing, costs, known, machine), highlight=False)
        run = _Run(folder, missing, costs, console)
        try:
            with run.progress:
                run.finish(machine)
        except KeyboardInterrupt:
            console.print(
                f"Interrupted; {sum(map(folder.has, cells))} of {len(cells)} results "
                f"are in {out}. Repeat the command to go on.",
                style="yellow",
            )
            raise
        finally:
            shutil.rmtree(out / TRAININGS, ignore_errors=True)
            folder.write_rows()
            present(out, console)
    if run.failed:
        raise RuntimeError(
            f"{run.failed} of {len(missing)} parts failed; the tracebacks are in "
            f"{out / 'cells'}. Repeat the command to try them again."
        )


class _Run:
    """The run of the cells that a folder lacks, with its progress; ``failed`` counts
    failed cells.
    """

    def __init__(
        self,
        folder: RunFolder,
        cells: Sequence[Cell],
        costs: Mapping[str, float],
        console: Console,
    ) -> None:
        self.folder, self.console, self.failed, self._costs = folder, console, 0, costs
        self._untried = {cell.name: cell for cell in cells}
        self._count, self._cost = len(cells), sum(costs[cell.name] for cell in cells)
        self._start, self._said = perf_counter(), perf_counter()
        columns = (
            BarColumn(30),
            TextColumn("{task.percentage:.0f} % {task.description}", markup=False),
        )
        self.progress = Progress(*columns, console=console, transient=True)
        self._bar = self.progress.add_task("", total=max(self._cost, 1e-9))
        self._of_job: dict[Job, tuple[str, float]] = {}

    def finish(self, machine: Machine) -> None:
        """Run all cells. If a process dies, its current cell fails and its later cells
        are run again.
        """
        while self._untried:
            trainings = self.folder.path / TRAININGS
            shutil.rmtree(
                trainings, ignore_errors=True
            )  # Left by a process that was killed.
            trainings.mkdir()
            run_jobs(self._jobs(machine.grid), machine, self._hear, self._show)

    def _hear(self, job: Job, said: Any) -> None:
        if isinstance(said, Ended):
            left = [cell for cell in job.arguments[0] if cell.name in self._untried]
            for cell in left[: 1 if said.died else None]:
                self._fail(cell, said.failure)
            self._of_job.pop(job, None)
        elif said[0] == "progress":
            self._of_job[job] = said[1:]
        else:
            _, name, rows, alignment, log, failure = said
            cell = self._untried[name]
            if failure:
                self._fail(cell, failure)
            else:
                self.folder.add(cell, rows, alignment, log)
                values = [
                    (row["metric"], math.nan if row["value"] is None else row["value"])
                    for row in rows
                    if row["scope"] == "central"
                    and row["round"] == cell.experiment.rounds
                ]
                shown = [
                    *values[:1],
                    *(own for own in values[1:] if own[0] in ("macro_f1", "loss")),
                ]
                self._tell(
                    cell, ", ".join(f"{metric} {value:.3f}" for metric, value in shown)
                )
        self._show()

    def _jobs(self, grid: Any = None) -> list[Job]:
        """Return the jobs, the longest first; one job for cells that share their first
        trainings.
        """
        groups = defaultdict[object, list[Cell]](list)
        for cell in self._untried.values():
            groups[cell.trains_first].append(cell)
        longest = sorted(
            groups.values(),
            key=lambda own: -sum(self._costs[cell.name] for cell in own),
        )
        scratch = self.folder.path.absolute() / TRAININGS
        work = partial(run_job, grid=grid)
        return [
            Job(
                cells[0].name,
                work,
                (cells, [self._costs[cell.name] for cell in cells], scratch),
            )
            for cells in longest
        ]

    def _fail(self, cell: Cell, failure: str) -> None:
        self.failed += 1
        file = self.folder.fail(cell, failure)
        self._tell(cell, f"FAILED, see {file}: {failure.strip().splitlines()[-1]}")

    def _tell(self, cell: Cell, said: str) -> None:
        del self._untried[cell.name]
        number = self._count - len(self._untried)
        self.console.print(
            f"[{number} of {self._count}] {cell.title}: {said}", highlight=False
        )
        self._said = perf_counter()

    def _show(self) -> None:
        """Show the progress: on a terminal a bar, else a line after a silence."""
        running = sum(done for _, done in self._of_job.values())
        left = sum(self._costs[name] for name in self._untried)
        done = max(self._cost - left + running, 0.0)
        self._start = (
            self._start if done else perf_counter()
        )  # Processes start before anything is done.
        spent = perf_counter() - self._start
        rest = (
            f"about {in_words(spent * (self._cost / done - 1))} left"
            if done and spent > 5
            else ""
        )
        said = "; ".join(
            [*filter(None, [rest]), *(text for text, _ in self._of_job.values())]
        )
        self.progress.update(self._bar, completed=done, description=said)
        if not self.console.is_terminal and perf_counter() - self._said > SILENCE:
            self.console.print(
                f"{100 * done / self._cost:.0f} % {said}", highlight=False
            )
            self._said = perf_counter()


def run_job(
    cells: Sequence[Cell],
    costs: Sequence[float],
    trainings: Path,
    tell: Tell,
    grid: Any = None,
) -> None:
    """Run cells that share the trainings of their clients: those of a grid; None: in
    this process.

    Say the progress, ``("progress", text, cost done in this cell)``, and for each cell
    ``("cell", name, rows, alignment, log, traceback)``. Trainings are kept in
    ``trainings`` if this machine has it.
    """
    torch.set_num_threads(1)
    first = cells[0].experiment
    # Modules and data stay: a collection after each cell need not look at them.
    gc.collect()
    gc.freeze()
    with ExitStack() as stack:
        log = stack.enter_context(_logged())
        folder = trainings if trainings.is_dir() else None
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(
                prefix="fedrot-", dir=folder, ignore_cleanup_errors=True
            )
        )
        # Clients keep models for the next request here, and not among the user's
        # caches.
        stack.enter_context(patch.dict(os.environ, {"XDG_CACHE_HOME": scratch}))
        if grid is None:
            stack.enter_context(outside_of_the_engine())
            grid = OrderedGrid(local_clients(app, first.clients), first.clients)
        for cell, cost in zip(cells, costs, strict=True):
            found: tuple[list[Any], list[Any]] = ([], [])
            failure = ""
            try:
                with _counting(tell, cell, cost):
                    run = run_cell(cell, grid, Path(scratch))
                found = run.rows, run.alignment
            except Exception:
                failure = f"{log.getvalue()}\n{traceback.format_exc()}"
            shutil.rmtree(Path(scratch) / "fedrot-bodies", ignore_errors=True)
            tell(("cell", cell.name, *found, log.getvalue(), failure))
            log.seek(0)
            log.truncate()
            gc.collect()  # A strategy refers to itself, and holds models and updates.


@contextmanager
def _counting(tell: Tell, cell: Cell, cost: float) -> Iterator[None]:
    """Tell the progress of a cell while rows pass through its model."""
    done, told = 0.0, 0.0

    def count(rows: float) -> None:
        nonlocal done, told
        done = min(done + rows, cost)
        if monotonic() - told > _BEAT:
            told = monotonic()
            said = f"{cell.strategy.name} (seed {cell.seed}) {100 * done / cost:.0f} %"
            tell(("progress", said, done))

    before, training.on_rows = training.on_rows, count
    try:
        yield
    finally:
        training.on_rows = before


@contextmanager
def _logged() -> Iterator[io.StringIO]:
    """Collect Flower's log inside of the context."""
    logger, log = logging.getLogger("flwr"), io.StringIO()
    before, propagate = list(logger.handlers), logger.propagate
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.handlers[:], logger.propagate = [handler], False
    try:
        yield log
    finally:
        logger.handlers[:], logger.propagate = before, propagate
