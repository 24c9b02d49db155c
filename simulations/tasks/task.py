"""``Task``: the data of an experiment, encoded and partitioned once per process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedrot.simulations.data.encode import Encoded, read_encoded
from fedrot.simulations.data.labels import DataSet
from fedrot.simulations.data.partition import partition_keys, split_clients
from fedrot.simulations.settings import Experiment
from fedrot.simulations.tasks.objectives import OBJECTIVES, Objective


@dataclass(frozen=True)
class Task:
    """The encoded data of one experiment, and the objective of training on it."""

    experiment: Experiment
    data: DataSet
    objective: Objective
    train: Encoded
    test: Encoded

    def clients(self, seed: int) -> list[np.ndarray]:
        """Return the numbers of each client's rows in the training split."""
        return _clients(self.experiment.to_json(), seed)

    def partition(self, seed: int) -> tuple[Sequence[str], list[list[int]]]:
        """Return names of the classes, and row counts by client and class."""
        labels, parts = self.data.train.labels, self.clients(seed)
        keys, names = partition_keys(labels, self.data.label_names)
        return names, [np.bincount(keys[part], minlength=len(names)).tolist() for part in parts]

    def client_rows(self, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of a client's training rows and of its held-out rows."""
        rows = np.random.default_rng([seed, client]).permutation(self.clients(seed)[client])
        held = int(len(rows) * self.experiment.holdout)
        return np.sort(rows[held:]), np.sort(rows[:held])


@lru_cache(maxsize=2)
def task_of(experiment_json: str) -> Task:
    """Load and encode the data of an experiment.

    Raises:
        DataError: the data cannot be used, or the tokenizer lacks a token that the task needs.
    """
    experiment = Experiment.model_validate_json(experiment_json)
    data, train, test = read_encoded(experiment)
    return Task(experiment, data, OBJECTIVES[experiment.task](experiment, data), train, test)


@lru_cache(maxsize=16)
def _clients(experiment_json: str, seed: int) -> list[np.ndarray]:
    task = task_of(experiment_json)
    experiment, train = task.experiment, task.data.train
    how = experiment.partition, experiment.clients, seed
    return split_clients(train.labels, train.columns, *how)
