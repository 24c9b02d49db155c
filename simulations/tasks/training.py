"""``Task``, the data of an experiment; training, evaluation, and checks before them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count, islice

import numpy as np
import torch
from numpy import ndarray
from numpy.random import Generator, default_rng
from torch.nn import Module

from fedrot.errors import FedrotError
from fedrot.simulations.data import Names
from fedrot.simulations.data.encode import Encoded, EncodedText
from fedrot.simulations.data.labels import DataSet
from fedrot.simulations.data.partition import (
    held_out_rows,
    parse_partition,
    partition_keys,
    split_clients,
)
from fedrot.simulations.data.read import DataError, clean
from fedrot.simulations.experiment import Experiment
from fedrot.simulations.tasks.objective import (
    Batch,
    Objective,
    Scores,
    model_inputs,
    shortest_first,
)
from fedrot.simulations.tasks.task_registry import TASKS

#: Number of batches that are made at once, from shuffled rows sorted by length.
_BUCKET = 16
#: Cost of evaluating a row, in rows of training.
EVALUATED = 1 / 3
#: Callbacks that receive the number of rows of each batch that was trained on or
#: evaluated. An evaluated row counts as ``EVALUATED`` rows.
ON_ROWS: list[Callable[[float], None]] = []


@dataclass(frozen=True)
class Task:
    """The encoded data of one experiment, and the objective of training on it."""

    experiment: Experiment
    data: DataSet
    objective: Objective
    train: Encoded
    test: Encoded

    def clients(self, seed: int) -> list[ndarray]:
        """Return the numbers of each client's rows in the training split."""
        return _clients(self.experiment.to_json(), seed)

    def partition(self, seed: int) -> tuple[Names, list[list[int]]]:
        """Return names of the classes, and row counts by client and class."""
        keys, names = partition_keys(self.data.train.labels, self.data.label_names)
        counts = [
            np.bincount(keys[part], minlength=len(names)).tolist()
            for part in self.clients(seed)
        ]
        return names, counts

    def client_rows(
        self,
        seed: int,
        client: int,
    ) -> tuple[ndarray, ndarray]:
        """Return the numbers of a client's training rows and of its held-out rows.

        Of each class with two rows, one or more are held out.
        """
        rows = self.clients(seed)[client]
        labels = self.data.train.labels[rows]
        rng = default_rng([seed, client])
        held_out = held_out_rows(labels, self.experiment.holdout, rng)
        return rows[~held_out], rows[held_out]

    def site(self, seed: int, client: int) -> int | str:
        """Return a client's value of the column that divides rows, or its number."""
        kind, column = parse_partition(self.experiment.partition)
        parts = self.clients(seed)
        # A client that has never answered has the number of its node.
        if kind != "column" or client >= len(parts):
            return client
        values = self.data.train.columns[column]
        names = sorted({clean(values[row]) for row in parts[client]})
        if len(names) > 3:
            names[2:] = [f"{len(names) - 2} more"]
        return " + ".join(names)


@lru_cache(maxsize=2)
def task_of(experiment_json: str) -> Task:
    """Load and encode the data of an experiment.

    Raises:
        DataError: the data cannot be used, or the tokenizer lacks a token that the task
            needs.
    """
    experiment = Experiment.model_validate_json(experiment_json)
    task = TASKS[experiment.task]
    data, train, test = task.read(experiment)
    return Task(experiment, data, task(experiment, data), train, test)


@lru_cache(maxsize=16)
def _clients(experiment_json: str, seed: int) -> list[ndarray]:
    task = task_of(experiment_json)
    return split_clients(
        task.data.train.labels,
        task.data.train.columns,
        task.experiment.partition,
        task.experiment.clients,
        seed,
    )


def _report(rows: float) -> None:
    for callback in ON_ROWS:
        callback(rows)


def batches(
    encoded: Encoded,
    rows: ndarray,
    size: int,
    rng: Generator,
) -> Iterator[ndarray]:
    """Yield batches of rows of similar length in random order; each row occurs once."""
    shuffled = rng.permutation(rows)
    sorted_batches = []
    for start in range(0, len(shuffled), size * _BUCKET):
        bucket = shuffled[start : start + size * _BUCKET]
        for places in shortest_first(encoded, bucket, size):
            sorted_batches.append(bucket[places])
    for index in rng.permutation(len(sorted_batches)):
        yield sorted_batches[index]


def step_batches(
    task: Task,
    model: Module,
    rows: ndarray,
    limit: int,
    size: int,
    seed: int,
) -> Iterator[Batch]:
    """Yield at most ``limit`` random rows, in batches of at most ``size``."""
    encoded = task.train
    rng = default_rng(seed)
    chosen = rng.permutation(task.objective.usable(encoded, rows))[:limit]
    for places in batches(encoded, chosen, size, rng):
        batch = task.objective.batch(encoded, places, rng)
        yield model_inputs(model, batch)


def train(
    model: Module,
    task: Task,
    rows: ndarray,
    seed: int,
    epochs: float | None = None,
    lr: float | None = None,
) -> float:
    """Train in place with AdamW on rows of the training split.

    Without ``epochs`` and ``lr``, the experiment has them.

    Half an epoch is half of the batches, rounded up, chosen by the seed. Returns the
    mean loss over the last epoch's steps; NaN if no row has anything to predict.
    """
    experiment = task.experiment
    rows = task.objective.usable(task.train, rows)
    size = experiment.batch_size
    an_epoch = math.ceil(len(rows) / size)
    # 0.28 times 25 is a little more than 7 in floating-point numbers.
    steps = math.ceil((epochs or experiment.local_epochs) * an_epoch - 1e-9)
    torch.manual_seed(seed)
    rng = default_rng(seed)
    masks = default_rng([seed, 1])
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        lr=lr or experiment.lr,
        weight_decay=experiment.weight_decay,
        fused=True,
    )
    model.train()
    endless = (batches(task.train, rows, size, rng) for _ in count())
    every = chain.from_iterable(endless)
    losses = []
    for places in islice(every, steps):
        batch = task.objective.batch(task.train, places, masks)
        loss = task.objective.loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        _report(len(places))
    if not losses:
        return math.nan
    return float(np.mean(losses[-an_epoch:]))


def evaluate(
    model: Module,
    task: Task,
    split: Encoded,
    rows: ndarray,
) -> Scores:
    """Return the task's metrics and ``loss`` on rows of a split.

    The headline metric is the first.

    All values are NaN if no row has anything to predict, or if the loss is not finite.
    ``split`` is ``task.train`` or ``task.test``, and ``rows`` are int64 ``[n]``.
    """
    rows = task.objective.usable(split, rows)
    if not len(rows):
        return task.objective.diverged()

    def note(_: object, __: object, inputs: Batch) -> None:
        first = next(iter(inputs.values()))
        _report(EVALUATED * len(first))

    model.eval()
    counted = model.register_forward_pre_hook(note, with_kwargs=True)
    with counted, torch.inference_mode():
        return task.objective.evaluate(model, split, rows)


def check_labels(task: Task) -> None:
    """Raise ``DataError`` if labels cannot be learnt or tested.

    All are equal, or training and held-out rows share no class.
    """
    data = task.data
    if not task.objective.classifies or data.kind == "multi":
        return
    train = data.train.labels
    test = data.test.labels
    if len(np.union1d(train, test)) == 1:
        raise DataError(
            f"{data.name}: all rows have one label; check the label column "
            "(--label-column)"
        )
    common = np.intersect1d(train, test)
    if data.one_class and not common.size:
        raise DataError(
            f"{data.name}: training and held-out rows share no class; give both the "
            "same"
        )


def check_model(task: Task, model: Module) -> None:
    """Raise ``FedrotError`` if a model cannot be trained on the rows of a task.

    The longest rows of each split are used, and that with the largest token, because
    the model's tables may be too small for them. The gradient is computed, too, but
    nothing is trained.
    """
    experiment = task.experiment
    name = experiment.model or experiment.architecture
    model.eval()
    for split, encoded in (("training", task.train), ("held-out", task.test)):
        rows = task.objective.usable(encoded, np.arange(len(encoded)))
        if not len(rows):
            raise DataError(f"{task.data.name}: no {split} row has anything to predict")
        tried = _hardest(encoded, rows)
        try:
            batch = task.objective.batch(encoded, tried, default_rng(0))
            task.objective.loss(model, batch).backward()
            model.zero_grad(set_to_none=True)
        except Exception as error:  # models raise many unrelated kinds
            reason = " ".join(str(error).split())
            raise FedrotError(
                f"model '{name}' cannot be trained on '{task.data.name}' for task "
                f"'{experiment.task}': a trial step on {split} rows failed "
                f"({type(error).__name__}: {reason:.300}). Texts may be longer than "
                "its positions (--max-length), or the tokenizer another model's."
            ) from error
    task.objective.check(model, name, encoded.batch(tried[:1]))


def _hardest(encoded: Encoded, rows: ndarray) -> ndarray:
    """Return the two longest rows and that with the largest token."""
    order = encoded.lengths(rows).argsort(kind="stable")
    hardest = rows[order[-2:]]
    if isinstance(encoded, EncodedText):
        largest = max(rows, key=lambda row: encoded.ids[row].max())
        hardest = np.append(hardest, largest)
    return hardest
