"""Cells of experiments, each run in Flower's strategy loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedrot.aggregation import aggregation_named
from fedrot.lora import AdapterOptions
from fedrot.options import AlignmentOptions
from fedrot.simulations.comparison.summary import OF_CLIENT
from fedrot.simulations.federation.cell_run import CellRun
from fedrot.simulations.federation.grids import OrderedGrid
from fedrot.simulations.federation.own_rows import OwnRows, finish_round
from fedrot.simulations.models import load_tensors
from fedrot.simulations.run_folder import Cell, read_rows
from fedrot.simulations.tasks import training
from fedrot.strategies import (
    FedRot,
    FedRotLoRA,
    Guard,
    OtherBasis,
    Reporting,
    Server,
)
from fedrot.strategies.base import ReplyStrategy
from fedrot.strategies.client.moves import OTHER_BASIS_OPTIONS
from fedrot.strategies.round.asked import CLIENT_KEY, CLIENT_RECORD
from fedrot.strategies.wire.loaded_model import tensors_of
from fedrot.symmetry import symmetry_of


class CellStrategy(ReplyStrategy):
    """Mixin for the strategy of a cell.

    It samples the same clients in every strategy, and adds rows. ``network`` is a model
    to load tensors into, ``report`` the file of the alignment report.
    """

    trusts_ids = True
    reports_sites = False
    #: How adapters are loaded; see ``models.LOADERS``.
    loads = ""

    def __init__(self, cell: CellRun, model: Any, *args: Any, **kwargs: Any) -> None:
        experiment = cell.experiment
        strategy = cell.strategy
        self.cell = cell
        self.network = model
        self.report = cell.scratch / "alignment.jsonl"
        self.current_round = 0
        self.trained_round = 0
        server = replace(Server(**strategy.server), deterministic=True)
        share = strategy.fraction_train or experiment.fraction_train
        clients = len(strategy.clients) or experiment.clients
        super().__init__(
            *args,
            server=server,
            reporting=Reporting(self.report),
            fraction_train=share,
            fraction_evaluate=0.0,
            min_train_nodes=1,
            min_available_nodes=clients,
            weighted_by_key=strategy.weighted_by_key,
            train_metrics_aggr_fn=self._after_training,
            **kwargs,
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.current_round = server_round
        # Flower samples clients with the global random generator.
        random.seed(f"{self.cell.seed}:{server_round}")
        return super().configure_train(server_round, arrays, config, grid)

    def evaluate_centrally(
        self, server_round: int, arrays: ArrayRecord
    ) -> MetricRecord:
        """Evaluate a round's global model, in the last round with its final head."""
        if self.trained_round != server_round:
            raise RuntimeError(
                f"No client returned a usable update in round {server_round} of "
                f"{self.cell.title}. Flower's log says which clients failed, and why "
                "replies were dropped."
            )
        # A plug-in's strategy need not be one that fits heads, which have priors.
        priors = getattr(self, "priors", ())
        last = server_round == self.cell.experiment.rounds
        if last and self.cell.strategy.fit_at_end:
            result = self.cell.with_fitted_task_head(server_round, arrays, self.network)
            arrays = result.arrays
            priors = result.priors
        load_tensors(self.network, arrays.to_torch_state_dict(), self.loads)
        return MetricRecord(
            {**finish_round(self.cell, server_round, self.network, priors)}
        )

    def _after_training(self, contents: list[Any], key: str) -> MetricRecord:
        """Add the clients' losses, in the order of the clients."""
        self.trained_round = self.current_round
        losses = {
            content[CLIENT_RECORD][CLIENT_KEY]: content["metrics"]["train-loss"]
            for content in contents
        }
        # Replies arrive in any order.
        for client, loss in sorted(losses.items()):
            scope = f"{OF_CLIENT}{self.cell.task.site(self.cell.seed, client)}"
            self.cell.record(scope, self.current_round, {"train-loss": loss})
        return MetricRecord()


class FedRotCell(CellStrategy, FedRot):
    """``FedRot`` for one cell.

    All strategies use fedrot's mean: if none moves, all have equal bits.
    """

    def __init__(self, cell: CellRun, model: Any) -> None:
        strategy = cell.strategy
        alignment = None
        if strategy.alignment is not False:
            alignment = AlignmentOptions(**_fields(strategy.alignment))
        arguments = strategy.aggregation_arguments
        name = arguments.pop("name")
        # The registry takes functions: it calls those that an aggregation needs.
        values = {
            key: partial(lambda value: value, value) for key, value in arguments.items()
        }
        aggregation = aggregation_named(
            name,
            symmetry=lambda: symmetry_of(model.config, model.state_dict()),
            **values,
        )
        guard = None
        if strategy.guard:
            guard = Guard(strategy.guard, evaluate=self.evaluate_mean)
        super().__init__(
            cell,
            model,
            model.config.to_dict(),
            aggregation=aggregation,
            alignment=alignment,
            other_basis=None if alignment is None else _other_basis(cell),
            guard=guard,
            fit_head=strategy.fit_head,
        )

    def evaluate_mean(self, server_round: int, arrays: ArrayRecord) -> MetricRecord:
        """Evaluate one of the guard's means on the clients' held-out rows.

        No table reports these metrics.
        """
        load_tensors(self.network, arrays.to_torch_state_dict())
        task = self.cell.task
        rows = np.concatenate([*self.cell.client_rows().values()])
        return MetricRecord({**training.evaluate(self.network, task, task.train, rows)})


def _fields(settings: object) -> dict[str, Any]:
    """Return the fields of a setting that may also be true."""
    return {**settings} if isinstance(settings, dict) else {}


def _other_basis(cell: CellRun) -> OtherBasis | None:
    settings = cell.strategy.other_basis
    if settings is False:
        return None
    fields = _fields(settings)
    build = cell.model if fields.pop("model", True) else None
    changed = fields.pop("options", None)
    options = OTHER_BASIS_OPTIONS if changed is None else AlignmentOptions(**changed)
    return OtherBasis(model=build, options=options, **fields)


class FedRotLoRACell(CellStrategy, FedRotLoRA):
    """``FedRotLoRA`` for one cell."""


def strategy_of(cell: CellRun, model: Any) -> CellStrategy:
    """Return the strategy of a cell, with a model to load tensors into."""
    if not cell.experiment.lora:
        return FedRotCell(cell, model)
    return FedRotLoRACell(
        cell,
        model,
        model.peft_config["default"],
        AdapterOptions(**cell.strategy.adapters),
        fit_head=cell.strategy.fit_head,
    )


def run_cell(
    cell: Cell, grid: OrderedGrid, scratch: Path, save: Path | None = None
) -> CellRun:
    """Run a cell with its clients of a grid.

    It fails if no update of a round was accepted.
    """
    run = CellRun(
        cell.experiment,
        cell.seed,
        cell.strategy,
        grid.of(cell.strategy.clients),
        scratch,
        save,
    )
    RUNS[cell.strategy.kind](run)
    return run


def run_federated(cell: CellRun, build: Callable[..., Any] = strategy_of) -> None:
    """Run a cell in Flower's strategy loop; ``build`` returns its strategy."""
    model = cell.model()
    strategy = build(cell, model)
    strategy.report.unlink(missing_ok=True)
    result = strategy.start(
        cell.grid,
        ArrayRecord(tensors_of(model)),
        num_rounds=cell.experiment.rounds,
        train_config=ConfigRecord({**cell.job, "loads": strategy.loads}),
        evaluate_fn=strategy.evaluate_centrally,
    )
    for server_round, metrics in result.train_metrics_clientapp.items():
        cell.record("round", server_round, metrics)
    for row in read_rows(strategy.report) if strategy.report.exists() else ():
        if "client" in row:
            row["client"] = cell.task.site(cell.seed, row["client"])
        if "stage" not in row:
            cell.alignment.append({**cell.labels, **row})


def _run_head_only(cell: CellRun) -> None:
    """Fit the head of the first model, which is the model after all rounds."""
    model = cell.model()
    result = cell.with_fitted_task_head(0, ArrayRecord(tensors_of(model)), model)
    load_tensors(model, result.arrays.to_torch_state_dict())
    finish_round(cell, cell.experiment.rounds, model, result.priors)


def _run_alone(cell: CellRun) -> None:
    """Train the first model at each site alone, for the epochs of all rounds."""
    rounds = range(1, cell.experiment.rounds + 1)
    epochs = sum(map(cell.experiment.epochs, rounds))
    OwnRows(cell).train_on(cell.model(), epochs)


#: How a kind of strategy runs. Plug-ins add theirs, and what refuses wrong ones to
#: ``strategy.KINDS``.
RUNS: dict[str, Callable[[CellRun], None]] = {
    "fedrot": run_federated,
    "head_only": _run_head_only,
    "alone": _run_alone,
    "local_finetuning": run_federated,
}
