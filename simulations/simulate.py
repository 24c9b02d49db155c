"""``simulate``: runs what a run folder lacks, in jobs with shared trainings."""

from __future__ import annotations

import gc
import io
import logging
import os
import shutil
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fedrot.errors import FedrotError
from fedrot.simulations.checks import (
    checked,
    costs_of,
    estimate,
    longer,
    range_in_words,
    with_clients,
)
from fedrot.simulations.comparison.summary import CENTRAL, verdict
from fedrot.simulations.engine import Ended, Job, Machine, Tell, run_jobs
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.federation.cells import run_cell
from fedrot.simulations.federation.client_app import app
from fedrot.simulations.federation.grids import OrderedGrid, local_clients
from fedrot.simulations.report.pages import present
from fedrot.simulations.run_folder import (
    TRAININGS,
    Cell,
    Row,
    RunFolder,
    cells_of,
    config_in,
    only_writer,
    read_run,
)
from fedrot.simulations.tasks import training
from fedrot.strategies.reporting.verdict import HEAD_FAILED
from fedrot.strategies.wire.flower_compat import outside_of_the_engine

#: Seconds between two lines about the progress, where there is no terminal.
SILENCE = 30.0
#: Share of a run from which on its speed tells the time left.
TELLING = 0.02
#: Seconds between two reports of a job about its progress.
_BEAT = 0.5


def simulate(
    experiments: Sequence[Experiment],
    out: Path,
    command: str,
    console: Console,
    machine: Machine,
    *,
    save: Path | None = None,
    dry_run: bool = False,
) -> None:
    """Run what the folder ``out`` does not have yet.

    Args:
        save: a new or empty folder for the model of the recommended strategy, of one
            experiment. The strategy's first seed is run again for it.
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
    config_in(out)
    with _logged():
        experiments = [*map(with_clients, experiments)]
        known = {experiment.name: checked(experiment) for experiment in experiments}
    sentences = [sentence for result in known.values() for sentence in result.sentences]
    # Experiments on the same data have the same sentences.
    for sentence in dict.fromkeys(sentences):
        if sentence:
            console.print(sentence)
    cells = cells_of(experiments)
    costs = costs_of(cells, known)
    if dry_run:
        console.print(estimate(cells, costs, known, machine))
        console.print("Dry run: nothing was run or written.")
        return
    with only_writer(out):
        folder = RunFolder(
            out,
            {name: result.described for name, result in known.items()},
            command,
        )
        missing = [cell for cell in cells if not folder.has(cell)]
        finished = len(cells) - len(missing)
        if finished:
            console.print(f"{finished} of {len(cells)} results are there already.")
        if missing:
            console.print(estimate(missing, costs, known, machine))
        run = _Run(folder, missing, costs, console)
        try:
            with run.progress:
                run.finish(machine)
        except KeyboardInterrupt:
            finished = sum(map(folder.has, cells))
            console.print(
                f"Interrupted; {finished} of {len(cells)} results are in {out}. "
                "Repeat the command to go on.",
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
    if save:
        _save_recommended(cells, out, save, console)


def _save_recommended(
    cells: Sequence[Cell], out: Path, save: Path, console: Console
) -> None:
    """Run the recommended strategy with its first seed, and write its model."""
    result = verdict(read_run(out), cells[0].experiment.name)
    name = result.recommended.name if result else ""
    cell = next((cell for cell in cells if cell.strategy.name == name), None)
    if cell is None:
        raise FedrotError(
            f"The recommended strategy in '{out}' is {name}, of an earlier command. "
            "Name it in --strategies to save its model."
        )
    console.print(f"Runs again for its model: {cell.title}")
    messages: list[Any] = []
    run_job([cell], [nan], out / TRAININGS, messages.append, save=save)
    if messages[-1].failure:
        raise RuntimeError(f"{cell.title}: {messages[-1].failure}")
    console.print(f"Model: {save}")


@dataclass(frozen=True)
class CellProgress:
    """The message of a job about its current cell: a text, and the cost done so far."""

    text: str
    done: float


@dataclass(frozen=True)
class CellResult:
    """The message of a job about a cell that has ended.

    Attributes:
        name: the cell's.
        rows, alignment: what ``CellRun`` has; empty after a failure.
        log: Flower's log; empty after a failure.
        failure: log and traceback if the cell failed, else empty.
    """

    name: str
    rows: list[Row]
    alignment: list[Row]
    log: str
    failure: str = ""


class _Run:
    """The run of the cells that a folder lacks, with its progress.

    ``failed`` counts failed cells.
    """

    def __init__(
        self,
        folder: RunFolder,
        cells: Sequence[Cell],
        costs: Mapping[str, float],
        console: Console,
    ) -> None:
        self.folder = folder
        self.console = console
        self.failed = 0
        self._costs = costs
        self._untried = {cell.name: cell for cell in cells}
        self._count = len(cells)
        self._cost = self._cost_of(cells)
        self._start = self._printed = perf_counter()
        self.progress = Progress(
            BarColumn(30),
            TextColumn("{task.percentage:.0f} % {task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._bar = self.progress.add_task("", total=max(self._cost, 1e-9))
        self._of_job: dict[Job, CellProgress] = {}

    def _cost_of(self, cells: Iterable[Cell]) -> float:
        return sum(self._costs[cell.name] for cell in cells)

    def finish(self, machine: Machine) -> None:
        """Run all cells.

        If a process dies, its current cell fails and its later cells are run again.
        """
        trainings = self.folder.path / TRAININGS
        while self._untried:
            # A process that was killed has left its trainings.
            shutil.rmtree(trainings, ignore_errors=True)
            trainings.mkdir()
            run_jobs(self._jobs(machine.grid), machine, self._hear, self._show)

    def _hear(self, job: Job, message: CellProgress | CellResult | Ended) -> None:
        if isinstance(message, CellProgress):
            self._of_job[job] = message
        elif isinstance(message, CellResult):
            # Until the job tells of its next cell, it has done nothing of it.
            self._of_job[job] = CellProgress("", 0.0)
            self._finish_cell(message)
        else:
            # The cells that the job has not told of have failed.
            cells, *_ = job.arguments
            untried = [cell for cell in cells if cell.name in self._untried]
            if message.died:
                # Only the first one was running; the others are run again.
                untried = untried[:1]
            for cell in untried:
                self._fail(cell, message.failure)
            self._of_job.pop(job, None)
        self._show()

    def _finish_cell(self, result: CellResult) -> None:
        cell = self._untried[result.name]
        if result.failure:
            self._fail(cell, result.failure)
            return
        self.folder.add(cell, result.rows, result.alignment, result.log)
        texts: list[str] = []
        for row in result.rows:
            if row["scope"] != CENTRAL or row["round"] != cell.experiment.rounds:
                continue
            # The headline metric comes first.
            if not texts or row["metric"] in ("macro_f1", "loss"):
                texts.append(f"{row['metric']} {row['value']:z.3f}")
        if not texts:
            texts.append("each site has a model of its own")
        if any(row["metric"] == HEAD_FAILED and row["value"] for row in result.rows):
            texts.append("task head not fitted, the cell's log says why")
        self._print(cell, ", ".join(texts))

    def _jobs(self, grid: Any = None) -> list[Job]:
        """Return the jobs, the longest first.

        Cells that share their first trainings are one job.
        """
        groups = defaultdict[object, list[Cell]](list)
        for cell in self._untried.values():
            groups[cell.trains_first].append(cell)
        scratch = self.folder.path.absolute() / TRAININGS
        work = partial(run_job, grid=grid)
        jobs = []
        for cells in sorted(groups.values(), key=self._cost_of, reverse=True):
            costs = [self._costs[cell.name] for cell in cells]
            jobs.append(Job(cells[0].name, work, (cells, costs, scratch)))
        return jobs

    def _fail(self, cell: Cell, failure: str) -> None:
        self.failed += 1
        file = self.folder.fail(cell, failure)
        self._print(cell, f"FAILED, see {file}: {failure.strip().splitlines()[-1]}")

    def _print(self, cell: Cell, text: str) -> None:
        del self._untried[cell.name]
        number = self._count - len(self._untried)
        self.console.print(
            f"[{number} of {self._count}] {cell.title}: {text}", highlight=False
        )
        if number > 1:  # A line about the time left follows the first one.
            self._printed = perf_counter()

    def _show(self) -> None:
        """Show the progress: on a terminal a bar, else a line after a silence."""
        now = perf_counter()
        running = self._of_job.values()
        left = self._cost_of(self._untried.values())
        done = max(self._cost - left + sum(progress.done for progress in running), 0.0)
        texts = [progress.text for progress in running if progress.text]
        if not done:
            self._start = now  # Processes start before anything is done.
        elif left and now - self._start > 5 and done > TELLING * self._cost:
            seconds = (now - self._start) * (self._cost / done - 1)
            seconds *= longer(len(self._jobs()), len(running) or 1)
            texts.insert(0, f"about {range_in_words(seconds)} left")
        text = "; ".join(texts)
        self.progress.update(self._bar, completed=done, description=text)
        if not self.console.is_terminal and now - self._printed > SILENCE:
            self.console.print(
                f"{100 * done / self._cost:.0f} % {text}", highlight=False
            )
            self._printed = now


def run_job(
    cells: Sequence[Cell],
    costs: Sequence[float],
    trainings: Path,
    tell: Tell,
    grid: Any = None,
    save: Path | None = None,
) -> None:
    """Run cells that share the trainings of their clients, and tell what happens.

    The messages are ``CellProgress``, and for each cell a ``CellResult``. The clients
    are those of a grid; None: in this process. Trainings are kept in ``trainings`` if
    this machine has it. The last model goes to the folder ``save``.
    """
    torch.set_num_threads(1)
    count = cells[0].experiment.clients
    # Modules and data stay: a collection after each cell need not look at them.
    gc.collect()
    gc.freeze()
    temporary = tempfile.TemporaryDirectory(
        prefix="fedrot-",
        dir=trainings if trainings.is_dir() else None,
        ignore_cleanup_errors=True,
    )
    with (
        _logged() as log,
        temporary as scratch,
        # Clients keep models for the next request here, and not among the user's
        # caches.
        patch.dict(os.environ, XDG_CACHE_HOME=scratch),
        ExitStack() as stack,
    ):
        if grid is None:
            stack.enter_context(outside_of_the_engine())
            grid = OrderedGrid(local_clients(app, count), count)
        for cell, cost in zip(cells, costs, strict=True):
            try:
                with _counting(tell, cell, cost):
                    run = run_cell(cell, grid, Path(scratch), save)
                result = CellResult(cell.name, run.rows, run.alignment, log.getvalue())
            except Exception:
                failure = f"{log.getvalue()}\n{traceback.format_exc()}"
                result = CellResult(cell.name, [], [], "", failure)
            shutil.rmtree(Path(scratch) / "fedrot-bodies", ignore_errors=True)
            tell(result)
            log.seek(0)
            log.truncate()
            gc.collect()  # A strategy refers to itself, and holds models and updates.


@contextmanager
def _counting(tell: Tell, cell: Cell, cost: float) -> Iterator[None]:
    """Tell the progress of a cell while rows pass through its model."""
    done = 0.0
    told = 0.0

    def count(rows: float) -> None:
        nonlocal done, told
        done = min(done + rows, cost)
        if monotonic() - told > _BEAT:
            told = monotonic()
            title = f"{cell.strategy.name} (seed {cell.seed})"
            tell(CellProgress(f"{title} {100 * done / cost:.0f} %", done))

    training.ON_ROWS.append(count)
    try:
        yield
    finally:
        training.ON_ROWS.remove(count)


@contextmanager
def _logged() -> Iterator[io.StringIO]:
    """Collect Flower's log inside of the context."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("flwr")
    with patch.multiple(logger, handlers=[handler], propagate=False):
        yield log
