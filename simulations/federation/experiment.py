"""The cells of a configuration (seed, start, arm), each run through Flower's strategy loop."""

from __future__ import annotations

import json
import random
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import nn

from fedrot.simulations.arm import JOINED, Arm
from fedrot.simulations.config import SimulationConfig, Start
from fedrot.simulations.federation.arms import (
    aggregation_of,
    evaluate_at_clients,
    evaluate_held_out,
    evaluate_together,
    train_joined,
)
from fedrot.simulations.federation.client_app import ALONE
from fedrot.simulations.federation.ordered_grid import OrderedGrid
from fedrot.simulations.federation.run_folder import Rows, RunFolder
from fedrot.simulations.models.build import build_model, model_config
from fedrot.simulations.tasks.pretraining import load_pretrained
from fedrot.simulations.tasks.task import Task, task_of
from fedrot.strategies import FedRot, Guard
from fedrot.strategies.client_matching import OTHER_BASIS_OPTIONS
from fedrot.strategies.round.inbox import own_id
from fedrot.strategies.round.update import Update
from fedrot.strategies.settings import Execution, OtherBasis, Reporting

#: Called with (cell description, round, rounds) after every round.
Progress = Callable[[str, int, int], None]
#: Passes in which the clients of an arm that learns find a common basis.
LEARNING_PASSES = 3


@dataclass(frozen=True)
class ArmRun:
    """A cell of a configuration: one arm from one start with one seed; its rows go to ``rows``.

    ``initial`` has the metrics of the initial model, which cells of one seed and start share; it is
    empty until they are known.
    """

    task: Task
    seed: int
    start: Start
    arm: Arm
    rows: Rows
    progress: Progress
    initial: dict[str, float]

    @property
    def labels(self) -> dict[str, Any]:
        """The columns that all rows of the cell share."""
        setting = self.task.config.setting
        return {"setting": setting, "arm": self.arm.name, "start": self.start, "seed": self.seed}

    def model(self) -> nn.Module:
        """Return the initial model of the seed and start."""
        config = self.task.config
        model = build_model(config, self.task.data, self.seed)
        if self.start == "pretrained":
            load_pretrained(model, config)
        return model

    def record(self, scope: str, server_round: int, metrics: Mapping[str, Any]) -> None:
        """Write a row per metric."""
        own = {**self.labels, "round": server_round, "scope": scope}
        for name, value in metrics.items():
            self.rows.row({**own, "metric": name, "value": value})

    def finish_round(self, server_round: int, metrics: Mapping[str, float]) -> MetricRecord:
        """Write the global model's metrics and show the progress."""
        self.record("central", server_round, metrics)
        config = self.task.config
        name = f"{config.setting} · seed {self.seed} · {self.start} · {self.arm.name}"
        self.progress(name, server_round, config.rounds)
        return MetricRecord(dict(metrics))

    def evaluate(self, model: nn.Module, server_round: int) -> dict[str, float]:
        """Return the metrics of a global model on the held-out split."""
        if server_round > 0:
            return evaluate_held_out(self.task, model)
        if not self.initial:
            self.initial.update(evaluate_held_out(self.task, model))
        return self.initial


def run_cells(
    grid: Grid,
    config: SimulationConfig,
    folder: RunFolder,
    stop: threading.Event,
    progress: Progress,
    shared_cache: bool = True,
) -> None:
    """Run every cell of a configuration and write its rows as they come.

    With ``shared_cache``, arms share trainings of their clients, who have to see this machine's files.

    Raises:
        Interrupted: ``stop`` was set.
        RuntimeError: the nodes are not the configuration's clients, or a round brought no update.
    """
    task = task_of(config.to_json())
    for seed in config.seeds:
        folder.partition(config.setting, seed, *task.partition(seed))
    ordered = OrderedGrid(grid, stop, config.clients)
    for seed, cells in groupby(config.cells(), key=lambda cell: cell[0]):
        initial: dict[Start, dict[str, float]] = defaultdict(dict)
        with tempfile.TemporaryDirectory(prefix="fedrot-") as scratch:
            for _, start, arm in cells:
                cell = ArmRun(task, seed, start, arm, folder, progress, initial[start])
                run_cell(cell, ordered, Path(scratch), scratch if shared_cache else "")


def run_cell(cell: ArmRun, grid: OrderedGrid, scratch: Path, cache: str) -> None:
    """Run one cell.

    Args:
        grid: of the configuration's clients.
        scratch: a folder for temporary files.
        cache: folder of clients' results that cells of one seed share; empty for none.

    Raises:
        Interrupted: the grid was stopped.
        RuntimeError: a round brought no update.
    """
    if cell.arm.name == JOINED:
        _run_joined(cell)
    else:
        _run_federated(cell, grid, scratch, cache)


def _run_joined(cell: ArmRun) -> None:
    model = cell.model()
    for server_round in range(cell.task.config.rounds + 1):
        if server_round > 0:
            train_joined(cell.task, cell.seed, model, server_round)
        cell.finish_round(server_round, cell.evaluate(model, server_round))


def _run_federated(cell: ArmRun, grid: OrderedGrid, scratch: Path, cache: str) -> None:
    config, model = cell.task.config, cell.model()
    report = scratch / "alignment.jsonl"
    strategy = ArmStrategy(cell, model, report)
    job: dict[str, int | float | str | bool] = {
        "simulation": config.to_json(),
        "seed": cell.seed,
        "start": cell.start,
        "last-round": config.rounds,
        "cache": cache,
        "count": cell.arm.evidence in ("tokens", "learned"),
        "align": "+".join(cell.arm.parts) if cell.arm.aligns_at_clients else "",
        "chance": cell.arm.chance,
        "batches": cell.arm.batches,
    }
    if cell.arm.clients:
        grid = grid.of(cell.arm.clients)
    try:
        result = strategy.start(
            grid,
            ArrayRecord(model.state_dict()),
            num_rounds=config.rounds,
            train_config=ConfigRecord({**job}),
            evaluate_config=ConfigRecord({**job}),
            evaluate_fn=strategy.evaluate_centrally,
        )
    finally:
        reasons = _move_report(report, cell)
    lost = sorted(set(range(1, config.rounds + 1)) - strategy.trained_rounds)
    if lost:
        raise RuntimeError(
            f"No client returned a usable update in round {lost[0]} of arm '{cell.arm.name}', seed "
            f"{cell.seed}. Dropped: {reasons or 'none'}; failed clients are in Flower's log."
        )
    for server_round, metrics in result.train_metrics_clientapp.items():
        cell.record("alignment", server_round, dict(metrics))


class ArmStrategy(FedRot):
    """FedRot for one cell: samples the same clients in every arm, and writes the cell's rows.

    ``trained_rounds`` are those in which at least one update was accepted; ``updates`` are those of the
    last round, in the round's coordinates, if the arm needs them.
    """

    def __init__(self, cell: ArmRun, model: nn.Module, report: Path) -> None:
        task, arm = cell.task, cell.arm
        config = task.config
        at_server = arm.align and not arm.aligns_at_clients
        other_basis = OtherBasis(
            model=cell.model if arm.evidence == "probe" else None,
            options=replace(OTHER_BASIS_OPTIONS, **arm.changes) if arm.other_basis else arm.options,
            at_clients=arm.evidence == "clients",
            learning_passes=LEARNING_PASSES if arm.evidence == "learned" else 0,
        )
        super().__init__(
            model_config(config, task.data).to_dict(),
            anchor=arm.anchor,
            aggregation=aggregation_of(arm, task, cell.seed, model),
            options=arm.options if at_server else None,
            other_basis=other_basis if at_server else None,
            align=at_server,
            execution=Execution(deterministic=True),
            reporting=Reporting(report, all_metrics=True),
            guard=Guard(arm.guard, evaluate=self.evaluate_mean) if arm.guard else None,
            fraction_train=config.fraction_train,
            fraction_evaluate=1.0 if config.holdout else 0.0,
            min_train_nodes=1,
            min_evaluate_nodes=1 if config.holdout else 0,
            min_available_nodes=len(arm.clients) or config.clients,
            train_metrics_aggr_fn=self._after_training,
            evaluate_metrics_aggr_fn=self._after_evaluation,
        )
        self.cell, self.network = cell, model
        self.current_round = 0
        self.trained_rounds: set[int] = set()
        self.updates: list[Update] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.current_round, self.updates = server_round, []
        # Flower samples clients from the global generator.
        random.seed(f"{self.cell.seed}:{server_round}")
        return super().configure_train(server_round, arrays, config, grid)

    def on_update(self, update: Update) -> None:
        """Keep the updates of an arm that needs them."""
        super().on_update(update)
        if self.cell.arm.needs_updates:
            self.updates.append(update)

    def evaluate_mean(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Evaluate a mean that the guard compares, on the clients' own held-out rows."""
        self.network.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord(dict(evaluate_at_clients(self.cell.task, self.cell.seed, self.network)))

    def evaluate_centrally(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Evaluate the global model, or what the arm makes of the last round's updates."""
        cell, model = self.cell, self.network
        if server_round > 0 and self.updates:
            metrics = evaluate_together(cell.task, cell.arm, cell.seed, model, self.updates)
        else:
            model.load_state_dict(arrays.to_torch_state_dict())
            metrics = cell.evaluate(model, server_round)
        return cell.finish_round(server_round, metrics)

    def _after_training(self, contents: list[RecordDict], key: str) -> MetricRecord:
        self.trained_rounds.add(self.current_round)
        for client, metrics in _client_metrics(contents):
            alone = {k.removeprefix(ALONE): v for k, v in metrics.items() if k.startswith(ALONE)}
            self.cell.record(f"alone:{client}", self.current_round, alone)
            own = {k: v for k, v in metrics.items() if k == "train-loss" or k.startswith("seconds-")}
            self.cell.record(f"client:{client}", self.current_round, own)
        return MetricRecord()

    def _after_evaluation(self, contents: list[RecordDict], key: str) -> MetricRecord:
        for client, metrics in _client_metrics(contents):
            if metrics.pop(key) > 0:
                self.cell.record(f"client:{client}", self.current_round, metrics)
        return MetricRecord()


def _move_report(report: Path, cell: ArmRun) -> list[str]:
    """Append a cell's alignment report to the run's, and return why replies were dropped."""
    rows = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    report.unlink(missing_ok=True)
    for row in rows:
        cell.rows.alignment({**cell.labels, **row})
    return sorted({row["dropped"] for row in rows if "dropped" in row})


def _client_metrics(contents: list[RecordDict]) -> list[tuple[int, dict[str, Any]]]:
    """Return every client's id and metrics in the order of the ids; replies arrive in any order."""
    found = []
    for content in contents:
        (metrics,) = content.metric_records.values()
        client = own_id(content)
        assert client is not None, "our ClientApp always names itself"
        found.append((client, dict(metrics)))
    return sorted(found, key=lambda pair: pair[0])
