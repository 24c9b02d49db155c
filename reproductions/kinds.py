"""Kinds of strategies: ensembles, rivals' adapters, rotated adapters, and one model on
all rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import nn

from fedrot.lora import load_adapter, train_only
from fedrot.options import AlignmentOptions
from fedrot.simulations.comparison.summary import BOUNDS
from fedrot.simulations.federation.cell_run import CellRun
from fedrot.simulations.federation.cells import RUNS, CellStrategy, run_federated
from fedrot.simulations.federation.own_rows import finish_round
from fedrot.simulations.models import LOADERS, model_config
from fedrot.simulations.scenario import Scenario
from fedrot.simulations.strategy import KINDS, NAMED, Strategy, refuse_unread
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task_registry import TASKS, named_tasks
from fedrot.strategies import FedRot
from fedrot.strategies.round.aligner import Aligner
from fedrot.strategies.round.update import Moved, Update
from fedrot.strategies.wire.loaded_model import tensors_of
from fedrot.tensors import Tensors
from reproductions.adapter_symmetry import ADAPTERS, adapter_symmetry
from reproductions.ensemble import Ensemble, with_state
from reproductions.lora_clients import load_first, load_folded
from reproductions.lora_rivals import RivalOptions
from reproductions.lora_strategies import FedAvgRivalLoRA


class _Keeping(Aligner):
    """Leaves updates as they were received, and adds a client's model to ``models`` for
    each.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network, self.models = network, list[nn.Module]()

    def move(self, update: Update) -> Moved:
        self.models.append(with_state(self.network, update.tensors))
        return super().move(update)


class EnsembleCell(CellStrategy, FedRot):
    """FedAvg for one cell, whose clients' models answer together by the options of
    ``Ensemble``.
    """

    def __init__(self, cell: CellRun, model: nn.Module) -> None:
        settings = model_config(cell.experiment, cell.task.data)
        super().__init__(cell, model, settings.to_dict(), alignment=None)
        self._models: list[nn.Module] = []

    def aligner(self, *_: Any) -> Aligner:
        """Return an aligner that keeps the clients' models."""
        kept = _Keeping(self.network)
        self._models = kept.models
        return kept

    def evaluate_centrally(
        self, server_round: int, arrays: ArrayRecord
    ) -> MetricRecord:
        """Evaluate the clients' models of the round together."""
        if not self._models:
            return super().evaluate_centrally(server_round, arrays)
        model = Ensemble(self._models, **self.cell.strategy.options)
        return MetricRecord({**finish_round(self.cell, server_round, model)})


class RivalCell(CellStrategy, FedAvgRivalLoRA):
    """``FedAvg`` of a rival's adapters for one cell."""

    def __init__(self, cell: CellRun, model: Any) -> None:
        adapters = RivalOptions(**cell.strategy.options)
        super().__init__(cell, model, model.peft_config["default"], adapters)
        self._how = (
            "fold" if adapters.folds else "first" if adapters.method == "pad" else "all"
        )
        self.loads = f"{self._how} both"

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Tell the clients which factors they train."""
        config["loads"] = f"{self._how} {self.adapters.trained(server_round)}"
        return super().configure_train(server_round, arrays, config, grid)


class AdaptersCell(CellStrategy, FedRot):
    """``FedRot`` of adapters for one cell, by options of ``AlignmentOptions`` other
    than ``parts``.
    """

    def __init__(self, cell: CellRun, model: nn.Module) -> None:
        options = AlignmentOptions(parts=(ADAPTERS,), **cell.strategy.options)
        super().__init__(
            cell, model, adapter_symmetry(tensors_of(model)), alignment=options
        )


def _load(load: Any, factors: str, model: Any, tensors: Tensors) -> None:
    """Load an adapter of which a client trains these factors."""
    load(model, tensors)
    train_only(model, factors)


# What refuses a strategy of a kind


def _check(
    strategy: Strategy, experiment: Scenario, of_adapters: bool | None = None
) -> None:
    """Refuse what the kind does not read, and experiments with or without adapters."""
    fitted = ["fit_at_end"] if of_adapters else []
    refuse_unread(strategy, "fraction_train", "weighted_by_key", "options", *fitted)
    if of_adapters is not None and of_adapters != bool(experiment.lora):
        what = "adapters; give lora" if of_adapters else "whole models; leave out lora"
        raise ValueError(f"kind '{strategy.kind}' is for {what}")


def _check_ensemble(strategy: Strategy, experiment: Scenario) -> None:
    _check(strategy, experiment, of_adapters=False)
    if strategy.options.keys() - {"probabilities"}:
        raise ValueError(
            f"options of an ensemble are {strategy.options}; give probabilities or none"
        )
    if not TASKS[experiment.task].classifies:
        able = " or ".join(map(repr, named_tasks("classifies")))
        raise ValueError(f"ensembles are for task {able}, not for '{experiment.task}'")


def _check_adapters(strategy: Strategy, experiment: Scenario) -> None:
    _check(strategy, experiment, of_adapters=True)
    if len(set(experiment.ranks)) > 1:
        raise ValueError("factors of different ranks cannot be rotated")
    AlignmentOptions(parts=(ADAPTERS,), **strategy.options)


def _check_rival(strategy: Strategy, experiment: Scenario) -> None:
    _check(strategy, experiment, of_adapters=True)
    adapters = RivalOptions(**strategy.options)
    if len(set(experiment.ranks)) > 1 and not adapters.averaging.any_rank:
        raise ValueError(
            f"factors of different ranks have no mean (method '{adapters.method}')"
        )


def run_joined(cell: CellRun, fewer: bool = False) -> None:
    """Train one model on all clients' rows, with ``fewer`` for as many steps as one
    client.
    """
    model, experiment, clients = (
        cell.model(),
        cell.experiment,
        cell.client_rows(held_out=False),
    )
    rows, share = (
        np.sort(np.concatenate([*clients.values()])),
        1 / len(clients) if fewer else 1.0,
    )
    finish_round(cell, 0, model)
    for server_round in range(1, experiment.rounds + 1):
        stream, epochs = (
            cell.seed * 1_000 + server_round,
            share * experiment.epochs(server_round),
        )
        training.train(model, cell.task, rows, stream, epochs, cell.job["lr"])
        finish_round(cell, server_round, model)


NAMED["joined"] = {
    "kind": "joined",
    "says": "One model, trained on the rows of all clients.",
}
KINDS |= {
    "joined": _check,
    "ensemble": _check_ensemble,
    "rival": _check_rival,
    ADAPTERS: _check_adapters,
    "joined-steps": _check,
}
RUNS |= {
    "joined": run_joined,
    "ensemble": partial(run_federated, build=EnsembleCell),
    "rival": partial(run_federated, build=RivalCell),
    ADAPTERS: partial(run_federated, build=AdaptersCell),
    "joined-steps": partial(run_joined, fewer=True),
}
BOUNDS |= {
    "joined": "all rows in one place, an upper bound",
    "ensemble": "the clients' models answer together; there is no merged model",
    "joined-steps": "all rows in one place, for as many steps as one client",
}
LOADERS |= {
    f"{how} {factors}": partial(_load, load, factors)
    for how, load in (
        ("all", load_adapter),
        ("first", load_first),
        ("fold", load_folded),
    )
    for factors in ("A", "B", "both")
}
