"""Ensembles, joined training, and the aggregators of arms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrot.aggregation import Aggregator, aggregation_named
from fedrot.collect.statistic_kinds import TRAINED
from fedrot.research import Candidate, regmean_plus_plus
from fedrot.simulations.arm import JOINED_STEPS, Arm
from fedrot.simulations.models.federated import load_tensors
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.task import Task
from fedrot.strategies.round.update import Update
from fedrot.symmetry import Symmetry, symmetry_of
from fedrot.tensors import Tensors

#: Training rows in a batch of statistics, and batches; Jin et al. (2023), section 5.1 and Table 6.
STATISTICS_BATCH, STATISTICS_BATCHES = 16, 100


class Ensemble(nn.Module):
    """The average prediction of ``transformers`` classifiers (Jin et al. 2023, section 4.2).

    With ``probabilities``, these are averaged instead of logits; ``logits`` of the output are then their
    logarithms (log odds of several labels). Regressions always average their outputs.
    """

    def __init__(self, models: Sequence[Any], probabilities: bool = False) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.config = models[0].config
        self.probabilities = probabilities and self.config.problem_type != "regression"

    def forward(self, **inputs: Tensor) -> SimpleNamespace:
        """Return an object with the ``logits`` ``[rows, labels]`` of all models together."""
        logits = torch.stack([model(**inputs).logits for model in self.models])
        if not self.probabilities:
            return SimpleNamespace(logits=logits.mean(0))
        if self.config.problem_type == "multi_label_classification":
            return SimpleNamespace(logits=logits.sigmoid().mean(0).logit(eps=1e-7))
        return SimpleNamespace(logits=logits.log_softmax(-1).logsumexp(0) - np.log(len(logits)))


def evaluate_ensemble(
    task: Task, arm: Arm, shell: nn.Module, states: Iterable[Tensors]
) -> dict[str, float]:
    """Return the metrics of the ensemble of the clients' models on the held-out split."""
    models = [with_state(shell, state) for state in states]
    return evaluate_held_out(task, Ensemble(models, arm.aggregation == "ensemble-probabilities"))


def evaluate_together(
    task: Task, arm: Arm, seed: int, shell: nn.Module, updates: Sequence[Update]
) -> dict[str, float]:
    """Return the metrics of what an arm makes of all clients' updates: an ensemble, or RegMean++."""
    if arm.ensemble:
        return evaluate_ensemble(task, arm, shell, (update.tensors for update in updates))

    def candidate(update: Update) -> Candidate:
        rows, _ = task.client_rows(seed, update.client)
        limit = (arm.batches or STATISTICS_BATCHES) * STATISTICS_BATCH
        how = (shell, rows, limit, STATISTICS_BATCH, seed * 1_000 + update.client)
        batches = partial(training.step_batches, task, *how)
        return Candidate(update.tensors, update.weight, batches, update.statistics.get(TRAINED))

    arguments: dict[str, Any] = arm.arguments
    candidates = [candidate(update) for update in updates]
    merged = regmean_plus_plus(shell, candidates, max_batches=None, **arguments)
    return evaluate_held_out(task, with_state(shell, merged))


def evaluate_held_out(task: Task, model: nn.Module) -> dict[str, float]:
    """Return the metrics of a model on the held-out split."""
    return training.evaluate(model, task, task.test, np.arange(len(task.test.labels)))


def evaluate_at_clients(task: Task, arm: Arm, seed: int, model: nn.Module) -> dict[str, float]:
    """Return the metrics of a model on the held-out rows, of the training split, of an arm's clients.

    Soups and guards choose by them: the held-out split, of which the tables report, chooses nothing.
    """
    return training.evaluate(model, task, task.train, _rows_of(task, arm, seed, held_out=True))


def with_state(shell: nn.Module, state: Tensors) -> nn.Module:
    """Return a copy of a model with other tensors."""
    model = copy.deepcopy(shell)
    load_tensors(model, state)
    return model


def aggregation_of(arm: Arm, task: Task, seed: int, shell: nn.Module) -> Callable[[], Aggregator] | None:
    """Return a function that builds the arm's aggregator, None if ``evaluate_together`` merges.

    The mean is ours in all arms: models that did not move are then the same to the last bit.
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
    """Train one model on the training rows of all clients for a round's epochs, or a client's steps."""
    rows = _rows_of(task, arm, seed, held_out=False)
    stream = seed * 1_000 + server_round
    share = 1 / task.config.clients if arm.name == JOINED_STEPS else 1.0
    training.train(model, task, np.sort(rows), stream, share * task.config.epochs(server_round))
