"""``ArmRun``, the run of a cell, and the strategies of cells: ``FedRot``, or an average of adapters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from logging import INFO
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedYogi
from torch import nn

from fedrot._io import write_text
from fedrot.lora import AdapterOptions
from fedrot.simulations.arm import TOGETHER, Arm
from fedrot.simulations.config import Start
from fedrot.simulations.federation.arms import (
    aggregation_of,
    evaluate_at_clients,
    evaluate_held_out,
)
from fedrot.simulations.federation.client_app import ALONE
from fedrot.simulations.federation.run_folder import OF_OWN_MODEL
from fedrot.simulations.federation.store import Cell, CellRows
from fedrot.simulations.models.build import build_model, model_config
from fedrot.simulations.models.federated import load_tensors, number_of_bytes
from fedrot.simulations.tasks.pretraining import load_pretrained
from fedrot.simulations.tasks.task import Task
from fedrot.strategies import AlignedLoRA, FedRot, FedRotLoRA, Guard, fit_task_head
from fedrot.strategies.base import ReplyStrategy
from fedrot.strategies.client_matching import OTHER_BASIS_OPTIONS
from fedrot.strategies.round.inbox import own_id
from fedrot.strategies.round.update import Moved
from fedrot.strategies.settings import OtherBasis, Reporting, Server

#: Passes over the clients to learn a common basis, in arms with evidence ``learned``.
LEARNING_PASSES = 3


@dataclass(frozen=True)
class ArmRun:
    """The run of a cell: one arm, start and seed. Its results are added to ``rows``.

    ``initial`` has the metrics of the initial model, which cells of one seed and start share. It is
    empty before the first evaluation. The file ``progress`` has a line about the last finished round.
    """

    task: Task
    seed: int
    start: Start
    arm: Arm
    rows: CellRows
    initial: dict[str, float]
    progress: Path

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
        """Add one row per metric."""
        own = {**self.labels, "round": server_round, "scope": scope}
        for name, value in metrics.items():
            self.rows.row({**own, "metric": name, "value": value})

    def finish_round(self, server_round: int, metrics: Mapping[str, float]) -> MetricRecord:
        """Add the global model's metrics, and write the progress to its file and to Flower's log."""
        self.record("central", server_round, metrics)
        config = self.task.config
        title = Cell(config, self.seed, self.start, self.arm).title
        write_text(self.progress, f"{title}: round {server_round}/{config.rounds}")
        log(INFO, "%s: round %d/%d", title, server_round, config.rounds)
        return MetricRecord(dict(metrics))

    def evaluate(self, model: nn.Module, server_round: int) -> dict[str, float]:
        """Return the metrics of a global model on the data set's held-out split."""
        if server_round > 0 or self.arm.fits_each_round:
            return evaluate_held_out(self.task, model)
        if not self.initial:
            self.initial.update(evaluate_held_out(self.task, model))
        return self.initial


class CellStrategy(ReplyStrategy):
    """Mixin for the strategy of a cell: samples the same clients in every arm, and adds rows.

    ``trained_rounds`` are the rounds with at least one accepted update. ``updates`` are the updates of
    the current round, in the round's coordinates, if the arm needs them.
    """

    trusts_ids = True
    #: How adapters are loaded; see ``models.federated.LOADERS``.
    loads = ""

    def __init__(self, cell: ArmRun, model: nn.Module, report: Path, *args: Any, **kwargs: Any) -> None:
        config = cell.task.config
        super().__init__(
            *args,
            server=Server(deterministic=True),
            reporting=Reporting(report),
            fraction_train=config.fraction_train,
            fraction_evaluate=1.0 if config.holdout else 0.0,
            min_train_nodes=1,
            min_evaluate_nodes=1 if config.holdout else 0,
            min_available_nodes=len(cell.arm.clients) or config.clients,
            train_metrics_aggr_fn=self._after_training,
            evaluate_metrics_aggr_fn=self._after_evaluation,
            **kwargs,
        )
        self.cell, self.network = cell, model
        self.current_round = 0
        self.clients: Grid
        self.job = ConfigRecord()
        self.trained_rounds: set[int] = set()
        self.updates: list[Moved] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.current_round, self.updates, self.clients = server_round, [], grid
        self.job = config
        # Flower samples clients with the global random generator.
        random.seed(f"{self.cell.seed}:{server_round}")
        return super().configure_train(server_round, arrays, config, grid)

    def on_update(self, moved: Moved) -> None:
        """Keep an update if the arm evaluates updates together."""
        super().on_update(moved)
        if self.cell.arm.needs_updates:
            self.updates.append(moved)

    def evaluate_centrally(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Evaluate the global model, or the updates of the round together if the arm does so."""
        cell, model = self.cell, self.network
        if cell.arm.fits_task_head and self.fits_head_after(server_round):
            arrays = self.with_fitted_head(server_round, arrays)
        if server_round > 0 and self.updates:
            evaluate = TOGETHER[cell.arm.aggregation].evaluate
            metrics = evaluate(cell.task, cell.arm, model, self.updates)
        else:
            load_tensors(model, arrays.to_torch_state_dict(), self.loads)
            metrics = cell.evaluate(model, server_round)
        return cell.finish_round(server_round, metrics)

    def fits_head_after(self, server_round: int) -> bool:
        """Return whether the evaluation of a round's model fits its head: that of the final model."""
        return server_round == self.cell.task.config.rounds and not self.cell.arm.fits_each_round

    def with_fitted_head(self, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        """Return the final model with the better of two task heads, and add rows about the choice."""
        config = ConfigRecord({**self.job, "server-round": server_round})
        found = fit_task_head(self.clients, arrays, self.network.config, config=config)
        losses = dict(zip(("as-it-was", "calibrated", "fitted"), found.losses, strict=True))
        chosen = {"kept": float(found.fitted), "temperature": found.temperature, "rows": found.rows}
        self.cell.record("task-head", server_round, {**losses, **chosen})
        return found.arrays

    def _after_training(self, contents: list[RecordDict], key: str) -> MetricRecord:
        self.trained_rounds.add(self.current_round)
        for client, metrics in _client_metrics(contents):
            alone = {k.removeprefix(ALONE): v for k, v in metrics.items() if k.startswith(ALONE)}
            self.cell.record(f"{OF_OWN_MODEL}{client}", self.current_round, alone)
            own = {k: v for k, v in metrics.items() if k == "train-loss" or k.startswith("seconds-")}
            self.cell.record(f"client:{client}", self.current_round, own)
        return MetricRecord()

    def _after_evaluation(self, contents: list[RecordDict], key: str) -> MetricRecord:
        for client, metrics in _client_metrics(contents):
            if metrics.pop(key) > 0:
                self.cell.record(f"client:{client}", self.current_round, metrics)
        return MetricRecord()


class ArmStrategy(CellStrategy, FedRot):
    """``FedRot`` for one cell."""

    def __init__(self, cell: ArmRun, model: nn.Module, report: Path) -> None:
        task, arm = cell.task, cell.arm
        at_server = arm.align and not arm.aligns_at_clients
        other_basis = OtherBasis(
            model=cell.model if arm.evidence == "probe" else None,
            options=replace(OTHER_BASIS_OPTIONS, **arm.changes) if arm.other_basis else arm.options,
            at_clients=arm.evidence == "clients",
            learning_passes=LEARNING_PASSES if arm.evidence == "learned" else 0,
        )
        super().__init__(
            cell,
            model,
            report,
            model_config(task.config, task.data).to_dict(),
            aggregation=aggregation_of(arm, task, cell.seed, model),
            alignment=arm.options if at_server else None,
            other_basis=other_basis if at_server else None,
            guard=Guard(arm.guard, evaluate=self.evaluate_mean) if arm.guard else None,
            fit_head=arm.fits_each_round,
        )

    def evaluate_mean(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Evaluate one of the guard's means on the clients' held-out rows."""
        load_tensors(self.network, arrays.to_torch_state_dict())
        return MetricRecord(
            dict(evaluate_at_clients(self.cell.task, self.cell.arm, self.cell.seed, self.network))
        )


class AdapterCell(CellStrategy):
    """Mixin for a cell of adapters: adds rows with the bytes of messages."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        sent = number_of_bytes(arrays.to_torch_state_dict())
        self.cell.record("bytes", server_round, {"broadcast": sent})
        return super().configure_train(server_round, arrays, config, grid)

    def on_update(self, moved: Moved) -> None:
        """Add the size of a reply, in bytes."""
        super().on_update(moved)
        size, client = number_of_bytes(moved.update.tensors), moved.update.client
        self.cell.record(f"client:{client}", self.current_round, {"bytes": size})


class AdapterStrategy(AdapterCell, FedRotLoRA):
    """``FedRotLoRA`` for one cell."""


class AdamStrategy(AdapterCell, AlignedLoRA, FedAdam):
    """``FedAdam`` of averaged adapters for one cell."""


class YogiStrategy(AdapterCell, AlignedLoRA, FedYogi):
    """``FedYogi`` of averaged adapters for one cell."""


#: The strategies of adapters, by ``SimulationConfig.server``.
OF_ADAPTERS = {"mean": AdapterStrategy, "adam": AdamStrategy, "yogi": YogiStrategy}


def strategy_of(cell: ArmRun, model: nn.Module, report: Path) -> CellStrategy:
    """Return the strategy of a cell; it writes its alignment report to the file ``report``."""
    config = cell.task.config
    if cell.arm.strategy is not None:
        return cell.arm.strategy(cell, model, report)
    if not config.lora:
        return ArmStrategy(cell, model, report)
    return adapter_strategy(OF_ADAPTERS, cell, model, report)


def adapter_strategy(
    by_server: Mapping[str, Callable[..., CellStrategy]], cell: ArmRun, model: nn.Module, report: Path
) -> CellStrategy:
    """Return the strategy of a cell of adapters; ``by_server`` is by ``SimulationConfig.server``."""
    network: Any = model
    config = cell.task.config
    settings, options = network.peft_config["default"], cell.arm.adapters or AdapterOptions()
    rate = {} if config.server == "mean" else {"eta": config.server_lr}
    return by_server[config.server](cell, model, report, settings, options, **rate)


def _client_metrics(contents: list[RecordDict]) -> list[tuple[int, dict[str, Any]]]:
    """Return the id and metrics of every client, ordered by id; replies arrive in any order."""
    found = []
    for content in contents:
        (metrics,) = content.metric_records.values()
        client = own_id(content)
        assert client is not None, "replies of the ClientApp have a client id"
        found.append((client, dict(metrics)))
    return sorted(found, key=lambda pair: pair[0])
