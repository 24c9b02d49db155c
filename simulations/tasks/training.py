"""``Task``, the data of an experiment; training and evaluation on it, and checks before
them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError
from fedrot.simulations.data.encode import Encoded, EncodedText, read_encoded
from fedrot.simulations.data.labels import DataSet
from fedrot.simulations.data.partition import partition_keys, split_clients
from fedrot.simulations.data.read import DataError
from fedrot.simulations.experiment import TASKS, Experiment
from fedrot.simulations.tasks.objectives import OBJECTIVES, Objective, model_inputs

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

    def clients(self, seed: int) -> list[np.ndarray]:
        """Return the numbers of each client's rows in the training split."""
        return _clients(self.experiment.to_json(), seed)

    def partition(self, seed: int) -> tuple[Sequence[str], list[list[int]]]:
        """Return names of the classes, and row counts by client and class."""
        labels, parts = self.data.train.labels, self.clients(seed)
        keys, names = partition_keys(labels, self.data.label_names)
        return names, [
            np.bincount(keys[part], minlength=len(names)).tolist() for part in parts
        ]

    def client_rows(self, seed: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of a client's training rows and of its held-out rows."""
        rows = np.random.default_rng([seed, client]).permutation(
            self.clients(seed)[client]
        )
        held = int(len(rows) * self.experiment.holdout)
        return np.sort(rows[held:]), np.sort(rows[:held])


@lru_cache(maxsize=2)
def task_of(experiment_json: str) -> Task:
    """Load and encode the data of an experiment.

    Raises:
        DataError: the data cannot be used, or the tokenizer lacks a token that the task
            needs.
    """
    experiment = Experiment.model_validate_json(experiment_json)
    data, train, test = read_encoded(experiment)
    return Task(
        experiment, data, OBJECTIVES[experiment.task](experiment, data), train, test
    )


@lru_cache(maxsize=16)
def _clients(experiment_json: str, seed: int) -> list[np.ndarray]:
    task = task_of(experiment_json)
    experiment, train = task.experiment, task.data.train
    how = experiment.partition, experiment.clients, seed
    return split_clients(train.labels, train.columns, *how)


def _report(rows: float) -> None:
    for callback in ON_ROWS:
        callback(rows)


def batches(
    encoded: Encoded, rows: np.ndarray, size: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield batches of rows of similar length in random order; each row occurs once."""
    shuffled = rng.permutation(rows)
    found: list[np.ndarray] = []
    for start in range(0, len(shuffled), size * _BUCKET):
        bucket = shuffled[start : start + size * _BUCKET]
        ordered = bucket[np.argsort(encoded.lengths(bucket), kind="stable")]
        found += [ordered[i : i + size] for i in range(0, len(ordered), size)]
    for index in rng.permutation(len(found)):
        yield found[index]


def step_batches(
    task: Task, model: nn.Module, rows: np.ndarray, limit: int, size: int, seed: int
) -> Iterator[dict[str, Tensor]]:
    """Yield at most ``limit`` random training rows, as training batches of at most
    ``size`` rows.
    """
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(task.objective.usable(task.train, rows))[:limit]
    for places in batches(task.train, chosen, size, rng):
        yield model_inputs(model, task.objective.batch(task.train, places, rng))


def train(
    model: nn.Module,
    task: Task,
    rows: np.ndarray,
    seed: int,
    epochs: float | None = None,
    lr: float | None = None,
) -> float:
    """Train in place with AdamW on rows of the training split; by default as the
    experiment says.

    Half an epoch is half of the batches, rounded up, chosen by the seed. Returns the
    mean loss over the last epoch's steps; NaN if no row has anything to predict.
    """
    experiment, objective = task.experiment, task.objective
    rows = objective.usable(task.train, rows)
    an_epoch = math.ceil(len(rows) / experiment.batch_size)
    steps = math.ceil((epochs or experiment.local_epochs) * an_epoch - 1e-9)
    losses: list[float] = []
    torch.manual_seed(seed)
    rng, masks = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate, decay = lr or experiment.lr, experiment.weight_decay
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=decay, fused=True)
    model.train()
    endless = (
        batches(task.train, rows, experiment.batch_size, rng) for _ in itertools.count()
    )
    for batch in itertools.islice(itertools.chain.from_iterable(endless), steps):
        loss = objective.loss(model, objective.batch(task.train, batch, masks))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        _report(len(batch))
    return float(np.mean(losses[-an_epoch:])) if losses else float("nan")


def evaluate(
    model: nn.Module, task: Task, split: Encoded, rows: np.ndarray
) -> dict[str, float]:
    """Return the task's metrics, the headline metric first, and the ``loss`` on rows of
    a split.

    All values are NaN if no row has anything to predict, or if the loss is not finite.
    ``split`` is ``task.train`` or ``task.test``, and ``rows`` are int64 ``[n]``.
    """
    rows = task.objective.usable(split, rows)
    if not len(rows):
        return task.objective.diverged()

    def count(_: object, __: object, inputs: Mapping[str, Tensor], ___: object) -> None:
        _report(EVALUATED * len(next(iter(inputs.values()))))

    model.eval()
    counted = model.register_forward_hook(count, with_kwargs=True)
    with counted, torch.inference_mode():
        return task.objective.evaluate(model, split, rows)


def check_labels(task: Task) -> None:
    """Raise ``DataError`` if all labels are equal, or training and held-out rows share
    no class.
    """
    data = task.data
    if not TASKS[task.experiment.task].classifies or data.kind == "multi":
        return
    train, test = (np.unique(split.labels) for split in (data.train, data.test))
    if len(np.union1d(train, test)) == 1:
        raise DataError(
            f"{data.name}: all rows have one label; check the label column "
            "(--label-column)"
        )
    if data.kind == "single" and not np.intersect1d(train, test).size:
        raise DataError(
            f"{data.name}: training and held-out rows share no class; give both the "
            "same"
        )


def check_model(task: Task, model: nn.Module) -> None:
    """Raise ``FedrotError`` if a model cannot compute its loss and gradient on the rows
    of a task.

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
        tried = rows[np.argsort(encoded.lengths(rows), kind="stable")[-2:]]
        if isinstance(encoded, EncodedText):
            tried = np.append(tried, max(rows, key=lambda row: encoded.ids[row].max()))
        try:
            batch = task.objective.batch(encoded, tried, np.random.default_rng(0))
            task.objective.loss(model, batch).backward()
            model.zero_grad(set_to_none=True)
        except Exception as error:  # models raise many unrelated kinds
            said = " ".join(str(error).split())
            raise FedrotError(
                f"model '{name}' cannot be trained on '{task.data.name}' for task "
                f"'{experiment.task}': a trial step on {split} rows failed "
                f"({type(error).__name__}: {said:.300}). Texts may be longer than its "
                "positions (--max-length), or the tokenizer another model's."
            ) from error
    if experiment.task == "clm":
        ids = encoded.batch(tried[:1])["input_ids"][:, :4]
        with torch.no_grad():
            whole, alone = (
                model(input_ids=part).logits[0, 0] for part in (ids, ids[:, :1])
            )
        if float((whole - alone).abs().max()) > 1e-5 * float(alone.abs().max()):
            raise FedrotError(
                f"model '{name}' is an encoder: its outputs depend on the tokens that "
                "task 'clm' predicts; choose a decoder, or task 'mlm'"
            )
