"""The temperature of a merged classifier, chosen by losses that clients sum over held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrot.collect.hooks import evaluating
from fedrot.collect.labelled import labelled_logits
from fedrot.errors import FedrotError, UpdateError
from fedrot.head import with_head
from fedrot.tensors import Tensors

#: From 1/4 to 16, each 9 % above the one before; 1 is among them.
TEMPERATURES = tuple(2.0 ** (step / 8) for step in range(-16, 33))


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over labelled rows of a classifier's losses; sums of clients add up (``+``).

    Attributes:
        temperatures: the divisors of the logits.
        losses: summed cross entropy at each temperature, float64 ``[temperatures]``.
        rows: number of rows.
        correct: rows whose most likely class is their label.

    Raises:
        UpdateError: losses that are not float64 ``[temperatures]``, negative or not finite; no rows; or
            more correct rows than rows.
    """

    temperatures: tuple[float, ...]
    losses: Tensor
    rows: float
    correct: float

    def __post_init__(self) -> None:
        losses, shape = self.losses, (len(self.temperatures),)
        if losses.dtype != torch.float64 or tuple(losses.shape) != shape:
            raise UpdateError(
                f"Summed losses are {losses.dtype} {list(losses.shape)}, not float64 {list(shape)}."
            )
        if not bool((torch.isfinite(losses) & (losses >= 0)).all()):
            raise UpdateError(
                "Summed losses are negative, NaN or Inf. Check the model's logits on the client's rows."
            )
        if not 0 < self.rows < math.inf or not 0 <= self.correct <= self.rows:
            raise UpdateError(f"{self.correct} of {self.rows} rows are counted as correct.")

    def __add__(self, other: LossSums) -> LossSums:
        """Return the sums over the rows of both; raises ``UpdateError`` if temperatures differ."""
        if self.temperatures != other.temperatures:
            raise UpdateError("Losses have different temperatures; use the same ones at all clients.")
        losses, rows = self.losses + other.losses, self.rows + other.rows
        return LossSums(self.temperatures, losses, rows, self.correct + other.correct)


def collect_losses(
    model: nn.Module, batches: Iterable[Tensors], temperatures: Sequence[float] = TEMPERATURES
) -> LossSums:
    """Return a model's summed losses on a client's held-out rows, at every temperature.

    Args:
        model: a ``transformers`` classifier; it is run in evaluation mode, without gradients, and is
            not changed.
        batches: keyword arguments of the model's forward, with ``labels`` ``[rows]`` or
            ``[rows, tokens]``; rows with a negative label are left out.
        temperatures: positive numbers, the same at all clients.

    Example: ``sums = collect_losses(model, held_out)``

    Raises:
        FedrotError: a temperature is not positive, or the batches have no labels for the model.
        UpdateError: the logits are not finite.
    """
    for temperature in temperatures:
        _check(temperature)
    total, rows, correct = torch.zeros(len(temperatures), dtype=torch.float64), 0, 0
    with torch.no_grad(), evaluating(model):
        for logits, labels in labelled_logits(model, batches):
            wide = logits.double()
            losses = [
                nn.functional.cross_entropy(wide / temperature, labels, reduction="sum")
                for temperature in temperatures
            ]
            total = total + torch.stack(losses).cpu()
            rows += len(labels)
            correct += int((logits.argmax(1) == labels).sum())
    return LossSums(tuple(temperatures), total, rows, correct)


def best_temperature(sums: LossSums) -> float:
    """Return the temperature with the smallest loss over all clients; at a tie the one nearest to 1.

    >>> best_temperature(LossSums((0.5, 1.0, 2.0), torch.tensor([9.0, 8.0, 7.0]).double(), 10, 6))
    2.0
    """
    losses = sums.losses.tolist()
    best = min(range(len(losses)), key=lambda i: (losses[i], abs(math.log(sums.temperatures[i]))))
    return sums.temperatures[best]


def with_temperature(tensors: Tensors, head: str, temperature: float) -> dict[str, Tensor]:
    """Return a classifier's tensors with its logits divided by a temperature.

    Weight and bias of the last layer are divided; the other tensors are the same objects.

    Args:
        tensors: a state dict.
        head: the name of the last linear layer, from ``fedrot.head.head_of``.

    Example: ``cooled = with_temperature(model.state_dict(), head, best_temperature(total))``

    Raises:
        FedrotError: the temperature is not positive, or there is no such layer.
    """
    _check(temperature)
    if f"{head}.weight" not in tensors:
        raise FedrotError(f"The model has no layer '{head}'; see fedrot.head.head_of.")
    weight = tensors[f"{head}.weight"].double() / temperature
    bias = tensors.get(f"{head}.bias", torch.zeros(())).double() / temperature
    return with_head(tensors, head, weight, bias)


def _check(temperature: float) -> None:
    if not 0 < temperature < math.inf:
        raise FedrotError(f"The temperature is {temperature}; it must be positive and finite.")
