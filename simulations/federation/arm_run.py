"""``ArmRun``: one cell of a configuration, its initial model and its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import MetricRecord
from torch import nn

from fedrot.simulations.arm import Arm
from fedrot.simulations.config import Start
from fedrot.simulations.federation.arms import evaluate_held_out
from fedrot.simulations.federation.run_folder import Rows
from fedrot.simulations.models.build import build_model
from fedrot.simulations.tasks.pretraining import load_pretrained
from fedrot.simulations.tasks.task import Task

#: Called with (cell description, round, rounds) after every round.
Progress = Callable[[str, int, int], None]


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
