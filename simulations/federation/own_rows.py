"""The sites' own test rows, and what models are worth there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from flwr.app import ArrayRecord
from numpy import ndarray
from numpy.random import default_rng

from fedrot.errors import FedrotError
from fedrot.simulations.data.partition import (
    parse_partition,
    partition_keys,
)
from fedrot.simulations.data.read import clean
from fedrot.simulations.models import load_tensors, tensors_of
from fedrot.simulations.site_gains import ALONE, GLOBAL, OF_SITE, OWN, TEST_ROWS
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
    of_test = keys[len(train) :]
    there = pd.Series(of_test).value_counts()
    counts, there = pd.Series(keys[rows]).value_counts().align(there, join="inner")
    shares = counts / counts.sum()
    without_repetition = (there / shares).min()
    size = np.clip(without_repetition, FEWEST, MOST)
    rng = default_rng([seed, client, MOST])
    drawn: list[int] = []
    for key, wanted in (shares * size).round().astype(int).items():
        shuffled = rng.permutation(np.flatnonzero(of_test == key))
        # Beyond their number, rows repeat.
        drawn += np.resize(shuffled, wanted).tolist()
    return np.array(sorted(drawn), dtype=np.int64)


class OwnRows:
    """The sites of a cell, to measure models on each site's own test rows.

    Rows of a site have the scope ``site:SITE``: the number of test rows, and the
    headline metric and the loss of its own model (``own-loss``), of the global model
    (``global-loss``) and of alone (head) (``alone-loss``).
    """

    def __init__(self, cell: CellRun) -> None:
        self.cell = cell
        self.task = cell.task
        self.clients = cell.client_rows(held_out=False)
        #: Whether models have a task head whose bias can have a site's priors.
        self.fits = self.task.objective.classifies and not self.task.data.domains

    def measure(self, model: Any, client: int, whose: str, shift: Any = 0.0) -> None:
        """Add rows of a model at one site, if it has test rows.

        ``whose`` is the start of the metrics' names. ``shift`` is added to the model's
        logits: a number, or ``[outputs]``.
        """
        task = self.task
        seed = self.cell.seed

        def shifted(_: object, __: object, answer: Any) -> Any:
            answer.logits = answer.logits + shift
            return answer

        if not len(rows := own_test_rows(task, seed, client)):
            return
        with model.register_forward_hook(shifted):
            scores = training.evaluate(model, task, task.test, rows)
        metrics: dict[str, float] = {TEST_ROWS: len(np.unique(rows))}
        for name in (task.objective.metrics[0], "loss"):
            metrics[f"{whose}{name}"] = scores[name]
        scope = f"{OF_SITE}{task.site(seed, client)}"
        self.cell.record(scope, self.cell.experiment.rounds, metrics)

    def measure_everywhere(self, model: Any, priors: Sequence[float]) -> None:
        """Add rows of the last global model, and of the sites' own ones."""
        tuned = self.cell.strategy.kind == "local_finetuning"
        for client, shift in self._shifts(model, priors).items():
            self.measure(model, client, GLOBAL)
            if not tuned:
                self.measure(model, client, OWN, shift)
        self.measure_alone()
        if tuned:
            self.train_on(model, 1.0)

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
        shifts = self._shifts(model)
        for place, client in enumerate(self.clients):
            try:
                result = cell.fit(cell.grid.of([place]), first, model)
            except FedrotError:  # The site holds no rows out, or the model has no head.
                continue
            load_tensors(model, result.arrays.to_torch_state_dict())
            self.measure(model, client, ALONE, shifts[client] if result.reason else 0.0)

    def train_on(self, model: Any, epochs: float) -> None:
        """Train a model on at each site alone, and add rows of the sites' models.

        If held-out rows choose, a site keeps the model as it was, unless the loss on
        those that it holds out falls.
        """
        cell = self.cell
        before = tensors_of(model)
        for client, rows in self.clients.items():
            load_tensors(model, before)
            old = self._held_out_loss(model, client)
            stream = (cell.seed * 1_000 + cell.experiment.rounds + 1) * 1_000 + client
            training.train(model, self.task, rows, stream, epochs, cell.job["lr"])
            falls = self._held_out_loss(model, client) < old
            if cell.strategy.chooses and not falls:
                load_tensors(model, before)
            self.measure(model, client, OWN)
        load_tensors(model, before)

    def _held_out_loss(self, model: Any, client: int) -> float:
        _, rows = self.task.client_rows(self.cell.seed, client)
        return training.evaluate(model, self.task, self.task.train, rows)["loss"]

    def _shifts(self, model: Any, priors: Sequence[float] = ()) -> dict[int, Any]:
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
        of_all = torch.tensor(priors)
        if not priors:
            of_all = OUTPUT_KINDS[name].priors(sum(counts.values()))
        return {client: site_shift(of_all, counts[client], name) for client in counts}
