"""What client and server derive from a configuration: data, encodings, partitions; once per process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.data_set import DataSet
from fedrot.simulations.data.encoding import Encoded
from fedrot.simulations.data.partition import parse_partition, split_clients
from fedrot.simulations.tasks.objectives import OBJECTIVES, Objective


@dataclass(frozen=True)
class Task:
    """The data of one configuration, encoded, and what models are trained for on it."""

    config: SimulationConfig
    data: DataSet[Any]
    objective: Objective
    train: Encoded
    test: Encoded

    def clients(self, seed: int) -> list[np.ndarray]:
        """Return each client's rows of the training split."""
        return _clients(self.config.to_json(), seed)

    def client_rows(self, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a client's training rows and its own held-out rows."""
        rows = np.random.default_rng([seed, client]).permutation(self.clients(seed)[client])
        held = int(len(rows) * self.config.holdout)
        return np.sort(rows[held:]), np.sort(rows[:held])


@lru_cache(maxsize=2)
def task_of(config_json: str) -> Task:
    """Load and encode the data of a configuration.

    Raises:
        DataError: the data cannot be used, or the tokenizer cannot serve the task.
    """
    config = SimulationConfig.model_validate_json(config_json)
    objective = OBJECTIVES[config.task]
    data = objective.reader.load(config)
    train, test = objective.reader.encode(config, data)
    return Task(config, data, objective.of(config, data), train, test)


@lru_cache(maxsize=16)
def _clients(config_json: str, seed: int) -> list[np.ndarray]:
    task = task_of(config_json)
    return split_clients(
        task.data.train.labels,
        task.data.train.columns,
        parse_partition(task.config.partition),
        task.config.clients,
        seed,
    )
