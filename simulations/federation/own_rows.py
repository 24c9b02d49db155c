"""The sites' own test rows, and what models are worth there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import nan
from typing import Any

import numpy as np
import pandas as pd
from numpy import ndarray
from numpy.random import default_rng

from fedrot.errors import FedrotError
from fedrot.simulations.comparison.site_gains import (
    ALONE,
    GLOBAL,
    OF_SITE,
    OWN,
    TEST_ROWS,
)
from fedrot.simulations.data.partition import parse_partition, partition_keys
from fedrot.simulations.data.read import clean
from fedrot.simulations.federation.cell_run import CellRun
from fedrot.simulations.federation.site_heads import task_heads_at_sites
from fedrot.simulations.models import load_tensors
from fedrot.simulations.saved.load import save_model
from fedrot.simulations.scenario import Settings
from fedrot.simulations.tasks import training
from fedrot.simulations.tasks.training import Task
from fedrot.strategies.wire.loaded_model import tensors_of

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
    # As many as without repetition, within bounds.
    size = np.clip((there / shares).min(), FEWEST, MOST)
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
    accuracy (of tasks without one the loss) of its own model (``own-accuracy``), of the
    global model (``global-accuracy``) and of alone (head) (``alone-accuracy``).
    """

    def __init__(self, cell: CellRun) -> None:
        self.cell = cell
        self.task = cell.task
        self.clients = cell.client_rows(held_out=False)
        self.test_rows = {
            client: own_test_rows(self.task, cell.seed, client)
            for client in self.clients
        }

    def measure_federated(self, model: Any, priors: Sequence[float]) -> None:
        """Add rows of the last global model, and of what sites have from it.

        Those of a classifier are what sites would report in a live run.
        """
        tuned = self.cell.strategy.kind == "local_finetuning"
        heads = (GLOBAL,) if tuned else (GLOBAL, OWN)
        if self.task.objective.classifies and not self.task.data.domains:
            # The model may have no head, or no site test rows.
            with suppress(FedrotError):
                for client, measure, values in task_heads_at_sites(
                    self.cell, model, priors, self.test_rows
                ):
                    # Of a tuned model, the site's own is measured below.
                    named = dict(zip((ALONE, *heads), values, strict=False))
                    self._record(client, measure, named)
        else:
            for client in self.clients:
                self._measure(model, client, *heads)
        if tuned:
            self.train_on(model, 1.0)

    def _measure(self, model: Any, client: int, *heads: str) -> None:
        """Add rows of a model as it is, at one site."""
        task = self.task
        rows = self.test_rows[client]
        scores = training.evaluate(model, task, task.test, rows)
        metric = "accuracy" if "accuracy" in scores else "loss"
        if len(rows):
            self._record(client, metric, dict.fromkeys(heads, scores[metric]))

    def _record(self, client: int, metric: str, values: Settings) -> None:
        """Add a site's rows of values by head."""
        metrics = {f"{head}-{metric}": value for head, value in values.items()}
        metrics[TEST_ROWS] = len(np.unique(self.test_rows[client]))
        scope = f"{OF_SITE}{self.task.site(self.cell.seed, client)}"
        self.cell.record(scope, self.cell.experiment.rounds, metrics)

    def train_on(self, model: Any, epochs: float) -> None:
        """Train a model on at each site alone, and add rows of the sites' models.

        If held-out rows choose, a site keeps the model as it was, unless the loss on
        those that it holds out falls.
        """
        cell = self.cell
        task = self.task
        before = tensors_of(model)
        chooses = cell.strategy.chooses
        of_choice = cell.client_rows()

        def held_out_loss(client: int) -> float:
            scores = training.evaluate(model, task, task.train, of_choice[client])
            return scores["loss"]

        for client, rows in self.clients.items():
            load_tensors(model, before)
            old = held_out_loss(client) if chooses else nan
            stream = (cell.seed * 1_000 + cell.experiment.rounds + 1) * 1_000 + client
            training.train(model, task, rows, stream, epochs, cell.job["lr"])
            if chooses and not held_out_loss(client) < old:
                load_tensors(model, before)
            self._measure(model, client, OWN)
        load_tensors(model, before)


def finish_round(
    cell: CellRun,
    server_round: int,
    model: Any,
    priors: Sequence[float] = (),
) -> dict[str, float]:
    """Evaluate a round's global model; add and return the metrics.

    What messages cost is added, too. After the last round models are evaluated on
    each site's own test rows as well. ``priors`` are those in the model's bias, if
    its head was fitted.
    """
    task = cell.task
    metrics = training.evaluate(model, task, task.test, np.arange(len(task.test)))
    cell.record("central", server_round, metrics)
    cell.record("messages", server_round, cell.grid.counted)
    if server_round == cell.experiment.rounds:
        OwnRows(cell).measure_federated(model, priors)
        if cell.save:
            if priors:
                model.config.fedrot = {"priors": [*priors]}
            save_model(model, cell.experiment, cell.save)
    return metrics
