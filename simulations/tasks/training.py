"""Local training and evaluation; the same seed gives the same bits."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from fedrot.simulations.data.encode import Encoded
from fedrot.simulations.tasks.objective import model_inputs
from fedrot.simulations.tasks.task import Task

#: Number of batches that are made at once, from shuffled rows sorted by length.
_BUCKET = 16
#: Cost of evaluating a row, in rows of training.
EVALUATED = 1 / 3


def on_rows(rows: float) -> None:
    """Take note of trained or evaluated rows; whoever shows the progress replaces this function."""


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
    """Yield at most ``limit`` random training rows, as training batches of at most ``size`` rows."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(task.objective.usable(task.train, rows))[:limit]
    for places in batches(task.train, chosen, size, rng):
        yield model_inputs(model, task.objective.batch(task.train, places, rng))


def lent_device() -> torch.device:
    """Return the GPU that Ray has assigned to this process, or the CPU."""
    ray = sys.modules.get("ray")
    return torch.device("cuda" if ray and ray.is_initialized() and ray.get_gpu_ids() else "cpu")


@contextmanager
def running_on(device: torch.device, model: nn.Module) -> Iterator[None]:
    """Move a model to a device, and finally back to the CPU; see ``model_inputs``."""
    model.to(device)
    try:
        yield
    finally:
        model.to("cpu")


def train(
    model: nn.Module,
    task: Task,
    rows: np.ndarray,
    seed: int,
    epochs: float | None = None,
    lr: float | None = None,
) -> float:
    """Train in place with AdamW on rows of the training split; by default as the experiment says.

    Training runs on the GPU that Ray has assigned to this process, if any. Half an epoch is half of the
    batches, rounded up, chosen by the seed. Returns the mean loss over the last epoch's steps; NaN if no
    row has anything to predict.
    """
    experiment, objective = task.experiment, task.objective
    rows = objective.usable(task.train, rows)
    an_epoch = math.ceil(len(rows) / experiment.batch_size)
    steps = math.ceil((epochs or experiment.local_epochs) * an_epoch - 1e-9)
    losses: list[float] = []
    with running_on(lent_device(), model):
        torch.manual_seed(seed)
        rng, masks = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        rate, decay = lr or experiment.lr, experiment.weight_decay
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=decay, fused=True)
        model.train()
        endless = (batches(task.train, rows, experiment.batch_size, rng) for _ in itertools.count())
        for batch in itertools.islice(itertools.chain.from_iterable(endless), steps):
            loss = objective.loss(model, objective.batch(task.train, batch, masks))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            on_rows(len(batch))
    return float(np.mean(losses[-an_epoch:])) if losses else float("nan")


def evaluate(model: nn.Module, task: Task, split: Encoded, rows: np.ndarray) -> dict[str, float]:
    """Return the task's metrics, the headline metric first, and the ``loss`` on rows of a split.

    All values are NaN if no row has anything to predict, or if the loss is not finite. ``split`` is
    ``task.train`` or ``task.test``, and ``rows`` are int64 ``[n]``.
    """
    rows = task.objective.usable(split, rows)
    if not len(rows):
        return task.objective.diverged()

    def count(_: object, __: object, inputs: Mapping[str, Tensor], ___: object) -> None:
        on_rows(EVALUATED * len(next(iter(inputs.values()))))

    model.eval()
    counted = model.register_forward_hook(count, with_kwargs=True)
    with running_on(lent_device(), model), counted, torch.inference_mode():
        return task.objective.evaluate(model, split, rows)
