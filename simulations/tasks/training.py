"""Local training, evaluation and pretraining; the same seed gives the same bits."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from fedrot.simulations.config import SimulationConfig as Experiment
from fedrot.simulations.data.encoding import Encoded
from fedrot.simulations.models import build_model
from fedrot.simulations.tasks.objective import model_inputs
from fedrot.simulations.tasks.task import Task, task_of

#: Number of batches that are made at once, from shuffled rows sorted by length.
_BUCKET = 16


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
    step: Callable[[], object] = lambda: None,
) -> float:
    """Train in place with AdamW on rows of the training split, for ``epochs`` or ``local_epochs``.

    Training runs on the GPU that Ray has assigned to this process, if any. Half an epoch is half of the
    batches, rounded up, chosen by the seed. Returns the mean loss over the last epoch's steps; NaN if no
    row has anything to predict. ``step`` is called after each step.
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
        lr, decay = experiment.lr, experiment.weight_decay
        optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=decay, fused=True)
        model.train()
        endless = (batches(task.train, rows, experiment.batch_size, rng) for _ in itertools.count())
        for batch in itertools.islice(itertools.chain.from_iterable(endless), steps):
            loss = objective.loss(model, objective.batch(task.train, batch, masks))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            step()
    return float(np.mean(losses[-an_epoch:])) if losses else float("nan")


def evaluate(
    model: nn.Module,
    task: Task,
    split: Encoded,
    rows: np.ndarray,
    step: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return the task's metrics, the headline metric first, and the ``loss`` on rows of a split.

    All values are NaN if no row has anything to predict, or if the loss is not finite. ``split`` is
    ``task.train`` or ``task.test``, and ``rows`` are int64 ``[n]``. ``step`` is called after each batch.
    """
    rows = task.objective.usable(split, rows)
    if not len(rows):
        return task.objective.diverged()

    def after(*_: object) -> None:
        step()

    model.eval()
    with running_on(lent_device(), model), model.register_forward_hook(after), torch.inference_mode():
        return task.objective.evaluate(model, split, rows)


def load_pretrained(model: nn.Module, experiment: Experiment, seed: int = 0) -> None:
    """Start ``pretrained``: load the encoder or decoder of a language model, trained on other texts.

    It is trained as ``experiment.pretraining`` says; all but its head is loaded into ``model`` in place.
    The default ``seed`` gives all runs the same pretrained model.

    Raises:
        DataError: the texts cannot be used.
    """
    model.load_state_dict(_trained(experiment.pretraining.to_json(), seed), strict=False)


@lru_cache(maxsize=8)
def _trained(experiment_json: str, seed: int) -> dict[str, Tensor]:
    """Return the trained tensors of the encoder or decoder, without those of the head."""
    task = task_of(experiment_json)
    model = build_model(task.experiment, task.data, seed)
    train(model, task, np.arange(len(task.train.labels)), seed)
    body = f"{model.base_model_prefix}."
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith(body)}
