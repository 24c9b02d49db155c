"""``CellRun``: the run of a cell, and the rows of its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

from fedrot.simulations.models import build_model
from fedrot.simulations.run_folder import Cell, Row
from fedrot.simulations.scenario import Settings
from fedrot.simulations.tasks.training import Task, task_of
from fedrot.strategies import fit_task_head
from fedrot.strategies.fitting.result import FittedTaskHead


@dataclass(frozen=True)
class CellRun(Cell):
    """The run of a cell; its results are added to ``rows`` and ``alignment``.

    ``grid`` has the clients that take part (None while the cell is only checked). Files
    go to the folder ``scratch``, through which clients on this machine share trainings.
    The model after the last round goes to the folder ``save``.
    """

    grid: Any = None
    scratch: Path = Path()
    save: Path | None = None
    rows: list[Row] = field(default_factory=list)
    alignment: list[Row] = field(default_factory=list)

    @property
    def task(self) -> Task:
        """The experiment's data and objective."""
        return task_of(self.experiment.to_json())

    @property
    def job(self) -> Row:
        """The fields that clients read, see ``client_app.ClientJob``."""
        return {
            "experiment": self.experiment.to_json(),
            "seed": self.seed,
            "lr": self.strategy.learning_rate or self.experiment.lr,
            "cache": str(self.scratch),
            "batches": self.strategy.batches,
            "loads": "",
            "server-round": 0,
        }

    @property
    def labels(self) -> Row:
        """The columns that all rows of the cell share."""
        return {
            "experiment": self.experiment.name,
            "strategy": self.strategy.name,
            "seed": self.seed,
        }

    def model(self) -> nn.Module:
        """Return the initial model of the seed."""
        return build_model(self.experiment, self.task.data, self.seed)

    def record(self, scope: str, server_round: int, metrics: Settings) -> None:
        """Add one row per metric."""
        shared = {**self.labels, "round": server_round, "scope": scope}
        for name, value in metrics.items():
            self.rows.append({**shared, "metric": name, "value": value})

    def client_rows(self, held_out: bool = True) -> dict[int, np.ndarray]:
        """Return the rows that each client holds out, or its training rows.

        The clients are those of the strategy.
        """
        clients = self.strategy.clients or range(self.experiment.clients)
        return {
            client: self.task.client_rows(self.seed, client)[held_out]
            for client in clients
        }

    def with_fitted_task_head(
        self, server_round: int, arrays: ArrayRecord, model: Any
    ) -> FittedTaskHead:
        """Return a model with the better of its task head and the fitted one."""
        config = ConfigRecord({**self.job, "server-round": server_round})
        settings = self.settings_of(model)
        result = fit_task_head(self.grid, arrays, settings, config=config)
        self.record("round", self.experiment.rounds, result.metrics())
        return result

    def settings_of(self, model: Any) -> Any:
        """Return what tells where a model's task head is."""
        if self.experiment.lora:
            return model.peft_config["default"]
        return model.config
