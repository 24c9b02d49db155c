"""``Task``: the data of a configuration, encoded and partitioned once per process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fedrot.simulations.config import SimulationConfig
from fedrot.simulations.data.data_set import DataSet
from fedrot.simulations.data.encoding import Encoded
from fedrot.simulations.data.partition import histogram, key_names, parse_partition, split_clients
from fedrot.simulations.tasks.objective import Objective
from fedrot.simulations.tasks.objectives import OBJECTIVES


@dataclass(frozen=True)
class Task:
    """The encoded data of one configuration, and the objective of training on it."""

    config: SimulationConfig
    data: DataSet[Any]
    objective: Objective
    train: Encoded
    test: Encoded

    def clients(self, seed: int) -> list[np.ndarray]:
        """Return the numbers of each client's rows in the training split."""
        return _clients(self.config.to_json(), seed)

    def partition(self, seed: int) -> tuple[Sequence[str], list[int], list[list[int]]]:
        """Return names of the classes, row counts by client, and row counts by client and class."""
        labels, parts = self.data.train.labels, self.clients(seed)
        names = key_names(labels, self.data.label_names)
        counts = histogram(labels, parts, len(names)).tolist()
        return names, [len(part) for part in parts], counts

    def client_rows(self, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of a client's training rows and of its held-out rows."""
        rows = np.random.default_rng([seed, client]).permutation(self.clients(seed)[client])
        held = int(len(rows) * self.config.holdout)
        return np.sort(rows[held:]), np.sort(rows[:held])


@lru_cache(maxsize=2)
def task_of(config_json: str) -> Task:
    """Load and encode the data of a configuration.

    Raises:
        DataError: the data cannot be used, or the tokenizer lacks a token that the task needs.
    """
    config = SimulationConfig.model_validate_json(config_json)
    objective = OBJECTIVES[config.task]
    data, train, test = objective.reader.read(config)
    return Task(config, data, objective.of(config, data), train, test)


@lru_cache(maxsize=16)
def _clients(config_json: str, seed: int) -> list[np.ndarray]:
    task = task_of(config_json)
    config, train = task.config, task.data.train
    how = parse_partition(config.partition)
    return split_clients(train.labels, train.columns, how, config.clients, seed)
