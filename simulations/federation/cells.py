"""Cells, an experiment with one seed and strategy each, and how they run in Flower's strategy loop."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from torch import nn

from fedrot.simulations.federation.grids import OrderedGrid
from fedrot.simulations.folder import file_name, title_of
from fedrot.simulations.models import build_model, load_tensors, tensors_of
from fedrot.simulations.settings import Experiment
from fedrot.simulations.strategy import Strategy
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task, task_of
from fedrot.strategies import fit_task_head
from fedrot.tensors import Tensors


@dataclass(frozen=True)
class Cell:
    """One experiment, seed and strategy."""

    experiment: Experiment
    seed: int
    strategy: Strategy

    @property
    def title(self) -> str:
        """The cell's title for people."""
        return title_of(self.experiment.name, self.seed, self.strategy.name)

    @property
    def name(self) -> str:
        """The cell's file name without suffix, unique for each cell."""
        return file_name(self.title)

    @property
    def trains_first(self) -> tuple[str, int]:
        """A key that is equal for cells that share the first round's trainings."""
        return self.experiment.training, self.seed


def cells_of(experiments: Iterable[Experiment]) -> list[Cell]:
    """Return all cells in the order of tables."""
    return [
        Cell(experiment, seed, strategy)
        for experiment in experiments
        for seed in experiment.seeds
        for strategy in experiment.strategies
    ]


@dataclass(frozen=True)
class CellRun:
    """The run of a cell; its results are added to ``rows`` and ``alignment``.

    ``initial`` has the metrics of the initial model, which cells of one seed share. It is empty before
    the first evaluation. ``grid`` has the clients that take part (None while the cell is only checked),
    and ``job`` is what they are told.
    """

    task: Task
    seed: int
    strategy: Strategy
    grid: Any = None
    job: Mapping[str, Any] = field(default_factory=dict)
    initial: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    alignment: list[dict[str, Any]] = field(default_factory=list)

    @property
    def labels(self) -> dict[str, Any]:
        """The columns that all rows of the cell share."""
        experiment = self.task.experiment.name
        return {"experiment": experiment, "strategy": self.strategy.name, "seed": self.seed}

    def model(self) -> nn.Module:
        """Return the initial model of the seed."""
        return build_model(self.task.experiment, self.task.data, self.seed)

    def record(self, scope: str, server_round: int, metrics: Mapping[str, Any]) -> None:
        """Add one row per metric."""
        own = {**self.labels, "round": server_round, "scope": scope}
        self.rows.extend({**own, "metric": name, "value": value} for name, value in metrics.items())

    def finish_round(self, server_round: int, model: nn.Module) -> dict[str, float]:
        """Evaluate a round's global model, add the metrics and what messages cost; return the metrics.

        After the last round the model is evaluated on each client's held-out rows, too.
        """
        task, rounds = self.task, self.task.experiment.rounds
        shared = server_round == 0 and not self.strategy.fits
        metrics = self.initial if shared and self.initial else evaluate_tests(task, model)
        if shared:
            self.initial.update(metrics)
        self.record("central", server_round, metrics)
        self.record("messages", server_round, self.grid.counted)
        clients = self.strategy.clients or range(task.experiment.clients)
        for client in clients if server_round == rounds else ():
            held_out = task.client_rows(self.seed, client)[1]
            if len(held_out):
                own = training.evaluate(model, task, task.train, held_out)
                self.record(f"client:{client}", server_round, own)
        log(INFO, "%s: round %d of %d", self.strategy.name, server_round, rounds)
        return dict(metrics)

    def with_fitted_head(self, server_round: int, arrays: ArrayRecord, model: Any) -> ArrayRecord:
        """Return a model with the better of two task heads, and add rows about the choice."""
        described = model.peft_config["default"] if self.task.experiment.lora else model.config
        config = ConfigRecord({**self.job, "server-round": server_round})
        found = fit_task_head(self.grid, arrays, described, config=config)
        losses = dict(zip(("as-it-was", "calibrated", "fitted"), found.losses, strict=True))
        chosen = {"kept": float(found.fitted), "temperature": found.temperature, "rows": found.rows}
        self.record("head", server_round, {**losses, **chosen})
        return found.arrays


def evaluate_tests(task: Task, model: nn.Module) -> dict[str, float]:
    """Return the metrics of a model on the test rows."""
    return training.evaluate(model, task, task.test, np.arange(len(task.test.labels)))


def evaluate_at_clients(cell: CellRun, model: nn.Module) -> dict[str, float]:
    """Return the metrics of a model on the held-out training rows of a cell's clients.

    Scores and guards use these. Tables report the test rows, which choose no model.
    """
    return training.evaluate(model, cell.task, cell.task.train, _rows_of(cell, held_out=True))


def with_state(shell: nn.Module, state: Tensors) -> nn.Module:
    """Return a copy of a model with other tensors."""
    model = copy.deepcopy(shell)
    load_tensors(model, state)
    return model


def _rows_of(cell: CellRun, held_out: bool) -> np.ndarray:
    clients = cell.strategy.clients or range(cell.task.experiment.clients)
    return np.concatenate([cell.task.client_rows(cell.seed, client)[held_out] for client in clients])


def run_cell(
    cell: Cell, grid: OrderedGrid, scratch: Path, initial: dict[str, float], *, shared_cache: bool
) -> tuple[CellRun, Exception | None]:
    """Run a cell; return its run, and its exception, None if it has none.

    Among other reasons, a cell fails if no update of a round was accepted.

    Args:
        grid: the grid of the experiment's clients.
        scratch: a folder for temporary files.
        initial: the metrics of the initial model, which cells of one experiment and seed share.
        shared_cache: clients keep their trainings for other cells in ``scratch``, which they can access.
    """
    experiment, strategy = cell.experiment, cell.strategy
    options = strategy.options_of_alignment if strategy.aligns_at_clients else None
    job = {
        "experiment": experiment.to_json(),
        "seed": cell.seed,
        "lr": strategy.learning_rate or experiment.lr,
        "cache": str(scratch) if shared_cache else "",
        "align": "+".join(options.parts) if options else "",
        "chance": options.chance if options else 0.0,
        "batches": strategy.batches,
        "loads": "",
        "server-round": 0,
    }
    task, own = task_of(experiment.to_json()), grid.of(strategy.clients)
    run = CellRun(task, cell.seed, strategy, own, job, initial)
    try:
        RUNS[strategy.kind](run, scratch)
    except Exception as error:
        return run, error
    return run, None


def run_federated(cell: CellRun, scratch: Path, build: Callable[..., Any] | None = None) -> None:
    """Run a cell in Flower's strategy loop; ``build`` returns its strategy."""
    from fedrot.simulations.federation.strategies import strategy_of

    experiment, model = cell.task.experiment, cell.model()
    report = scratch / "alignment.jsonl"
    strategy = (build or strategy_of)(cell, model, report)
    job = {**cell.job, "loads": strategy.loads}
    try:
        result = strategy.start(
            cell.grid,
            ArrayRecord(tensors_of(model)),
            num_rounds=experiment.rounds,
            train_config=ConfigRecord(job),
            evaluate_fn=strategy.evaluate_centrally,
        )
    finally:
        reasons = _move_report(report, cell)
    lost = sorted(set(range(1, experiment.rounds + 1)) - strategy.trained_rounds)
    if lost:
        raise RuntimeError(
            f"No client returned a usable update in round {lost[0]} of strategy '{cell.strategy.name}', "
            f"seed {cell.seed}. Dropped: {reasons or 'none'}; failed clients are in Flower's log."
        )
    for server_round, metrics in result.train_metrics_clientapp.items():
        cell.record("round", server_round, dict(metrics))


def _move_report(report: Path, cell: CellRun) -> list[str]:
    """Move a cell's alignment report to its run, and return why replies were dropped."""
    rows = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    rows = [row for row in rows if "stage" not in row]
    report.unlink(missing_ok=True)
    cell.alignment.extend({**cell.labels, **row} for row in rows)
    return sorted({row["dropped"] for row in rows if "dropped" in row})


def _run_head_only(cell: CellRun, scratch: Path) -> None:
    """Fit the head of the first model, which stays the model of all rounds."""
    model = cell.model()
    arrays = cell.with_fitted_head(0, ArrayRecord(tensors_of(model)), model)
    load_tensors(model, arrays.to_torch_state_dict())
    for server_round in range(cell.task.experiment.rounds + 1):
        cell.finish_round(server_round, model)


def run_joined(cell: CellRun, scratch: Path, share: float = 1.0) -> None:
    """Train one model on all clients' training rows, ``share`` of the epochs of a round."""
    model, experiment = cell.model(), cell.task.experiment
    for server_round in range(experiment.rounds + 1):
        if server_round > 0:
            rows, stream = np.sort(_rows_of(cell, held_out=False)), cell.seed * 1_000 + server_round
            epochs = share * experiment.epochs(server_round)
            training.train(model, cell.task, rows, stream, epochs, cell.job["lr"])
        cell.finish_round(server_round, model)


#: How a kind of strategy runs. Plug-ins add theirs, and what refuses wrong ones to ``strategy.KINDS``.
RUNS: dict[str, Callable[[CellRun, Path], None]] = {
    "fedrot": run_federated,
    "head_only": _run_head_only,
    "joined": run_joined,
}


def partitions_of(experiments: Sequence[Experiment]) -> dict[str, Any]:
    """Return the names of classes, and sizes and counts of all clients, by experiment and seed."""
    found: dict[str, Any] = {}
    for experiment in experiments:
        task = task_of(experiment.to_json())
        seeds = {}
        for seed in experiment.seeds:
            names, sizes, counts = task.partition(seed)
            seeds[str(seed)] = {"sizes": sizes, "counts": counts}
        found[experiment.name] = {"label_names": list(names), "seeds": seeds}
    return found
