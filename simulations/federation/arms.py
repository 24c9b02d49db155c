"""Joined training, and the aggregators of arms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from fedrot.aggregation import Aggregator, aggregation_named
from fedrot.simulations.arm import JOINED_STEPS, Arm
from fedrot.simulations.models.federated import load_tensors
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task
from fedrot.symmetry import Symmetry, symmetry_of
from fedrot.tensors import Tensors

#: Rows per batch for statistics, and number of batches; Jin et al. (2023), section 5.1 and Table 6.
STATISTICS_BATCH, STATISTICS_BATCHES = 16, 100


def evaluate_held_out(task: Task, model: nn.Module) -> dict[str, float]:
    """Return the metrics of a model on the data set's held-out split."""
    return training.evaluate(model, task, task.test, np.arange(len(task.test.labels)))


def evaluate_at_clients(task: Task, arm: Arm, seed: int, model: nn.Module) -> dict[str, float]:
    """Return the metrics of a model on the held-out training rows of an arm's clients.

    Scores and guards use these. Tables report the data set's held-out split, which chooses no model.
    """
    return training.evaluate(model, task, task.train, _rows_of(task, arm, seed, held_out=True))


def with_state(shell: nn.Module, state: Tensors) -> nn.Module:
    """Return a copy of a model with other tensors."""
    model = copy.deepcopy(shell)
    load_tensors(model, state)
    return model


def aggregation_of(arm: Arm, task: Task, seed: int, shell: nn.Module) -> Callable[[], Aggregator] | None:
    """Return a function that builds the arm's aggregator; None if its updates are evaluated together.

    All arms use fedrot's mean, so that arms that move nothing have the same bits.
    """

    def score() -> Callable[[Tensors], float]:
        return lambda tensors: -evaluate_at_clients(task, arm, seed, with_state(shell, tensors))["loss"]

    def symmetry() -> Symmetry:
        config: Any = shell.config
        return symmetry_of(config, shell.state_dict())

    if arm.needs_updates:
        return None
    given = {name: partial(float, value) for name, value in arm.arguments.items()}
    return aggregation_named(arm.aggregation, score=score, symmetry=symmetry, **given)


def _rows_of(task: Task, arm: Arm, seed: int, held_out: bool) -> np.ndarray:
    clients = arm.clients or range(task.config.clients)
    return np.concatenate([task.client_rows(seed, client)[held_out] for client in clients])


def train_joined(task: Task, arm: Arm, seed: int, model: nn.Module, server_round: int) -> None:
    """Train one model on all clients' training rows, for a round's epochs or one client's steps."""
    rows = _rows_of(task, arm, seed, held_out=False)
    stream = seed * 1_000 + server_round
    share = 1 / task.config.clients if arm.name == JOINED_STEPS else 1.0
    training.train(model, task, np.sort(rows), stream, share * task.config.epochs(server_round))
