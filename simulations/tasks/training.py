"""Local training and evaluation; the same seed gives the same bits."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedrot.simulations.data.encoding import Encoded
from fedrot.simulations.tasks.objective import model_inputs
from fedrot.simulations.tasks.task import Task

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
    task: Task, model: torch.nn.Module, rows: np.ndarray, limit: int, size: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
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
def running_on(device: torch.device, model: torch.nn.Module) -> Iterator[None]:
    """Run a model on a device. Outputs, and finally the model, are moved back to the CPU."""
    if device == torch.device("cpu"):
        yield
        return

    def there(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return arguments, {name: _moved(value, device) for name, value in named.items()}

    def back(_: Any, __: Any, output: Any) -> Any:
        return type(output)(**{name: _moved(value, "cpu") for name, value in output.items()})

    before = model.register_forward_pre_hook(there, with_kwargs=True)
    with before, model.register_forward_hook(back):
        model.to(device)
        try:
            yield
        finally:
            model.to("cpu")


def _moved(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def train(
    model: torch.nn.Module,
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
        options = {"lr": experiment.lr, "weight_decay": experiment.weight_decay}
        optimizer = torch.optim.AdamW(trained, **options, fused=True)
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
    model: torch.nn.Module,
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
