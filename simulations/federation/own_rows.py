"""The sites' own test rows, and what models are worth there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy import ndarray
from numpy.random import default_rng
from torch import nn

from fedrot.errors import FedrotError
from fedrot.simulations.data.partition import (
    parse_partition,
    partition_keys,
    rows_by_number,
)
from fedrot.simulations.data.read import clean
from fedrot.simulations.models import load_tensors, tensors_of
from fedrot.simulations.site_gains import ALONE, OWN, TEST_ROWS
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import Task
from fedrot.task_head.outputs import OUTPUT_KINDS
from fedrot.task_head.site_head import collect_counts, site_shift

if TYPE_CHECKING:
    from fedrot.simulations.federation.cells import CellRun

#: Most test rows that are drawn for a site.
MOST = 200
#: At least so many are drawn, if need be some of them more than once.
FEWEST = 20


def own_test_rows(task: Task, seed: int, client: int) -> ndarray:
    """Return the numbers of a site's test rows, int64 ``[n]``, ascending.

    * ``column:NAME``: those with the site's values, if the test rows have the column.
    * ``iid``: all.
    * Else up to ``MOST`` are drawn in the proportions of classes of the site's rows,
      which the division has drawn. There are as many as without repetition, but at
      least ``FEWEST``: then rows of scarce classes repeat. Classes without test rows
      are left out.
    """
    rows = task.clients(seed)[client]
    kind, column = parse_partition(task.experiment.partition)
    train, test = task.data.train, task.data.test
    if kind == "iid":
        return np.arange(len(test))
    if kind == "column" and column in test.columns:
        values = {clean(train.columns[column][row]) for row in rows}
        return np.flatnonzero([clean(cell) in values for cell in test.columns[column]])
    # The classes of scores depend on all scores.
    keys, _ = partition_keys(np.concatenate([train.labels, test.labels]))
    members = rows_by_number(keys[len(train) :])
    there = np.array([*map(len, members)])
    counts = np.bincount(keys[rows], minlength=len(there))[: len(there)] * (there > 0)
    shares = counts / max(counts.sum(), 1)
    without_repetition = min(there[counts > 0] / shares[counts > 0], default=0)
    wanted = np.rint(shares * min(MOST, max(FEWEST, without_repetition))).astype(int)
    rng = default_rng([seed, client, MOST])
    drawn = [
        rng.choice(part, size, replace=size > len(part))
        for part, size in zip(members, wanted, strict=True)
    ]
    return np.sort(np.concatenate(drawn))


class OwnRows:
    """The sites of a cell, to measure models on each site's own test rows.

    A site has rows of three scopes: ``own:SITE`` of its own model, ``own-global:SITE``
    of the global model, ``own-alone:SITE`` of alone (head). Each has the number of test
    rows, the headline metric and the loss.
    """

    def __init__(self, cell: CellRun) -> None:
        self.cell = cell
        self.task = cell.task
        self.clients = cell.client_rows(held_out=False)
        #: Whether models have a task head whose bias can have a site's priors.
        self.fits = self.task.objective.classifies and not self.task.data.domains

    def measure(self, model: nn.Module, client: int, shifts: Mapping[str, Any]) -> None:
        """Add rows of a model at one site, if it has test rows.

        Args:
            shifts: by scope, what is added to the logits of a classifier: 0, or
                ``[outputs]``. Other models are measured as they are.
        """
        task = self.task
        objective: Any = task.objective
        rows = own_test_rows(task, self.cell.seed, client)
        if not len(rows):
            return
        if self.fits:
            with torch.inference_mode():
                logits = objective.logits(model.eval(), task.test, rows)
        else:
            scores = training.evaluate(model, task, task.test, rows)
        site = task.site(self.cell.seed, client)
        for scope, shift in shifts.items():
            if self.fits:
                scores = objective.scores(logits + np.asarray(shift), task.test, rows)
            metrics = {name: scores[name] for name in (objective.metrics[0], "loss")}
            metrics[TEST_ROWS] = len(np.unique(rows))
            self.cell.record(f"{scope}{site}", self.cell.experiment.rounds, metrics)

    def shifts(self, model: Any, priors: Sequence[float] = ()) -> Mapping[int, Any]:
        """Return what each site adds to a model's logits.

        Without ``priors``, those of all clients' training rows are in its head.
        """
        if not self.fits:
            return dict.fromkeys(self.clients, 0.0)
        counts = {}
        for client, rows in self.clients.items():
            batches = training.step_batches(self.task, model, rows, len(rows), 64, 0)
            # The residuals of a regression that diverged may be no numbers.
            counts[client] = collect_counts(model, batches).nan_to_num()
        name = model.config.problem_type
        total = torch.stack([*counts.values()]).sum(0)
        of_all = torch.tensor(priors) if priors else OUTPUT_KINDS[name].priors(total)
        return {client: site_shift(of_all, counts[client], name) for client in counts}

    def measure_alone(self) -> None:
        """Add rows of heads of the first model, each fitted to one site's sums.

        Where none can be fitted, as to rows of one class, the first model's head has
        the site's priors. The first strategy measures them for all.
        """
        cell = self.cell
        if not self.fits or cell.strategy != cell.experiment.strategies[0]:
            return
        model = cell.model()
        first = ArrayRecord(tensors_of(model))
        shifts = self.shifts(model)
        for place, client in enumerate(self.clients):
            try:
                result = cell.fit(cell.grid.of([place]), first, model)
            except FedrotError:  # The site holds no rows out, or the model has no head.
                continue
            load_tensors(model, result.arrays.to_torch_state_dict())
            shift = shifts[client] if result.reason else 0.0
            self.measure(model, client, {ALONE: shift})

    def train_on(
        self, model: nn.Module, server_round: int, epochs: float, choose: bool
    ) -> None:
        """Train a model on at each site alone, and add rows of the sites' models.

        To ``choose``, each site keeps the model as it was, unless the loss on the rows
        that it holds out falls.
        """
        task, seed = self.task, self.cell.seed
        before = tensors_of(model)
        for client, rows in self.clients.items():
            load_tensors(model, before)
            _, held_out = task.client_rows(seed, client)
            old = training.evaluate(model, task, task.train, held_out)
            stream = (seed * 1_000 + server_round) * 1_000 + client
            training.train(model, task, rows, stream, epochs, self.cell.job["lr"])
            new = training.evaluate(model, task, task.train, held_out)
            if choose and not new["loss"] < old["loss"]:
                load_tensors(model, before)
            self.measure(model, client, {OWN: 0.0})
        load_tensors(model, before)
