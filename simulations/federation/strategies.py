"""The Flower strategies of cells: ``FedRot``, or ``FedRotLoRA`` for adapters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import nn

from fedrot.aggregation import Aggregator, aggregation_named
from fedrot.lora import AdapterOptions
from fedrot.options import AlignmentOptions
from fedrot.simulations.federation.cells import CellRun, evaluate_at_clients, with_state
from fedrot.simulations.models import load_tensors, model_config
from fedrot.strategies import FedRot, FedRotLoRA, Guard, OtherBasis, Reporting, Server
from fedrot.strategies.base import ReplyStrategy
from fedrot.strategies.client_matching import OTHER_BASIS_OPTIONS
from fedrot.strategies.round.inbox import own_id
from fedrot.symmetry import symmetry_of
from fedrot.tensors import Tensors


class CellStrategy(ReplyStrategy):
    """Mixin for the strategy of a cell: samples the same clients in every strategy, and adds rows.

    ``trained_rounds`` are the rounds with at least one accepted update.
    """

    trusts_ids = True
    #: How adapters are loaded; see ``models.LOADERS``.
    loads = ""

    def __init__(self, cell: CellRun, model: nn.Module, report: Path, *args: Any, **kwargs: Any) -> None:
        experiment, strategy = cell.task.experiment, cell.strategy
        super().__init__(
            *args,
            server=replace(Server(**strategy.server), deterministic=True),
            reporting=Reporting(report),
            fraction_train=strategy.fraction_train or experiment.fraction_train,
            fraction_evaluate=0.0,
            min_train_nodes=1,
            min_available_nodes=len(strategy.clients) or experiment.clients,
            weighted_by_key=strategy.weighted_by_key,
            train_metrics_aggr_fn=self._after_training,
            **kwargs,
        )
        self.cell, self.network = cell, model
        self.current_round = 0
        self.trained_rounds: set[int] = set()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.current_round = server_round
        # Flower samples clients with the global random generator.
        random.seed(f"{self.cell.seed}:{server_round}")
        return super().configure_train(server_round, arrays, config, grid)

    def evaluate_centrally(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Evaluate a round's global model, in the last round with the head that it ends with."""
        experiment, strategy = self.cell.task.experiment, self.cell.strategy
        if strategy.fit_at_end and server_round == experiment.rounds:
            arrays = self.cell.with_fitted_head(server_round, arrays, self.network)
        load_tensors(self.network, arrays.to_torch_state_dict(), self.loads)
        return MetricRecord({**self.cell.finish_round(server_round, self.network)})

    def _after_training(self, contents: list[RecordDict], key: str) -> MetricRecord:
        self.trained_rounds.add(self.current_round)
        replies = {own: content for content in contents if (own := own_id(content)) is not None}
        for client in sorted(replies):  # They arrive in any order.
            (metrics,) = replies[client].metric_records.values()
            more = {k: v for k, v in metrics.items() if k == "train-loss" or k.startswith("seconds-")}
            self.cell.record(f"client:{client}", self.current_round, more)
        return MetricRecord()


class FedRotCell(CellStrategy, FedRot):
    """``FedRot`` for one cell."""

    def __init__(self, cell: CellRun, model: nn.Module, report: Path) -> None:
        task, strategy = cell.task, cell.strategy
        options = None if strategy.aligns_at_clients else strategy.options_of_alignment
        super().__init__(
            cell,
            model,
            report,
            model_config(task.experiment, task.data).to_dict(),
            aggregation=aggregation_of(cell, model),
            alignment=options,
            other_basis=_other_basis(cell) if options is not None else None,
            guard=Guard(strategy.guard, evaluate=self.evaluate_mean) if strategy.guard else None,
            fit_head=strategy.fit_head,
        )

    def evaluate_mean(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Evaluate one of the guard's means on the clients' held-out rows."""
        load_tensors(self.network, arrays.to_torch_state_dict())
        return MetricRecord({**evaluate_at_clients(self.cell, self.network)})


def _other_basis(cell: CellRun) -> OtherBasis | None:
    given = cell.strategy.other_basis
    if given is False:
        return None
    fields = dict(given) if isinstance(given, dict) else {}
    build = cell.model if fields.pop("model", True) else None
    options = fields.pop("options", None)
    own = OTHER_BASIS_OPTIONS if options is None else AlignmentOptions(**options)
    return OtherBasis(model=build, options=own, **fields)


def aggregation_of(cell: CellRun, shell: nn.Module) -> Callable[[], Aggregator]:
    """Return a function that builds the strategy's aggregator.

    All strategies use fedrot's mean, so that those that move nothing have the same bits.
    """

    def score(tensors: Tensors) -> float:
        return -evaluate_at_clients(cell, with_state(shell, tensors))["loss"]

    config: Any = shell.config
    given = cell.strategy.aggregation_arguments
    name = given.pop("name")
    return aggregation_named(
        name,
        score=lambda: score,
        symmetry=lambda: symmetry_of(config, shell.state_dict()),
        **{key: partial(lambda value: value, value) for key, value in given.items()},
    )


class FedRotLoRACell(CellStrategy, FedRotLoRA):
    """``FedRotLoRA`` for one cell."""


def strategy_of(cell: CellRun, model: nn.Module, report: Path) -> CellStrategy:
    """Return the strategy of a cell; it writes its alignment report to the file ``report``."""
    if not cell.task.experiment.lora:
        return FedRotCell(cell, model, report)
    network: Any = model
    options, fit_head = AdapterOptions(**cell.strategy.adapters), cell.strategy.fit_head
    settings = network.peft_config["default"]
    return FedRotLoRACell(cell, model, report, settings, options, fit_head=fit_head)
