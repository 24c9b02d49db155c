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
from fedrot.head import read_inputs, with_head
from fedrot.tensors import Tensors

#: From 1/4 to 16, each 9 % above the one before; 1 is among them.
TEMPERATURES = tuple(2.0 ** (step / 8) for step in range(-16, 33))

#: The place of 1 among them.
ONE = TEMPERATURES.index(1.0)

#: The largest loss of a row that counts, also for logits that are not finite.
LARGEST_LOSS = 1e6


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over labelled rows of the losses of a classifier, or of several task heads for it.

    Sums of clients add up (``+``).

    Attributes:
        losses: summed cross entropy at each of ``TEMPERATURES``, float64 ``[heads, temperatures]``.
        squares: summed squares of the differences of a row's losses, of each head and of the second (of
            the first two heads: of the first), float64 ``[heads, temperatures]``.
        counts: number of rows, and rows whose most likely class by each head is their label, float64
            ``[1 + heads]``.

    Raises:
        UpdateError: another dtype or shape; negative numbers, NaN or Inf; no rows; or more correct rows
            than rows.
    """

    losses: Tensor
    squares: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        grid = (len(self.counts) - 1, len(TEMPERATURES))
        for name, shape in {"losses": grid, "squares": grid, "counts": (1 + grid[0],)}.items():
            value: Tensor = getattr(self, name)
            if value.dtype != torch.float64 or tuple(value.shape) != shape:
                raise UpdateError(f"The {name} are {value.dtype} {list(value.shape)}, not float64.")
            if not bool((torch.isfinite(value) & (value >= 0)).all()):
                raise UpdateError(f"The {name} are negative, NaN or Inf.")
        if not self.rows >= 1 or bool((self.counts > self.rows).any()):
            raise UpdateError(f"{self.counts[1:].tolist()} of {self.rows} rows are counted as correct.")

    @property
    def rows(self) -> float:
        """Number of rows."""
        return float(self.counts[0])

    def __add__(self, other: LossSums) -> LossSums:
        """Return the sums over the rows of both; raises ``UpdateError`` if they have other heads."""
        if len(self.counts) != len(other.counts):
            raise UpdateError("Losses are of different numbers of heads; use the same at all clients.")
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("losses", "squares", "counts"))
        return LossSums(*(ours + theirs for ours, theirs in pairs))


def collect_losses(
    model: nn.Module,
    batches: Iterable[Tensors],
    head: str = "",
    heads: tuple[Tensor, Tensor] | None = None,
) -> LossSums:
    """Return a model's summed losses on a client's held-out rows, at every temperature.

    A row's loss is at most ``LARGEST_LOSS``, also if logits are not finite.

    Args:
        model: a ``transformers`` classifier; it is run in evaluation mode, without gradients, and is
            not changed.
        batches: keyword arguments of the model's forward, with ``labels`` ``[rows]`` or
            ``[rows, tokens]``; rows with a negative label are left out.
        head: the name of the last linear layer, from ``fedrot.head.head_of``, if ``heads`` are given.
        heads: weights ``[heads, classes, inputs]`` and biases ``[heads, classes]`` in place of the
            layer's own.

    Example: ``sums = collect_losses(model, held_out)``

    Raises:
        FedrotError: the batches have no labels for the model, or there is no such layer.
    """
    batched: list[list[Tensor]] = []

    def add(logits: Sequence[Tensor], labels: Tensor) -> None:
        rows = torch.stack([_row_losses(one, labels) for one in logits])
        second = torch.cat([rows[:1].expand_as(rows[:2]), rows[1:2].expand_as(rows[2:])])
        correct = torch.stack([(one.argmax(1) == labels).sum() for one in logits])
        counts = torch.cat([correct.new_tensor([len(labels)]), correct]).double()
        batched.append([value.cpu() for value in (rows.sum(2), (rows - second).square().sum(2), counts)])

    def add_heads(features: Tensor, labels: Tensor, classes: int) -> None:
        weights, biases = (value.to(features) for value in heads or ())
        add([features @ w.mT + b for w, b in zip(weights, biases, strict=True)], labels)

    if heads is not None:
        read_inputs(model, batches, head, add_heads)
    else:
        with torch.no_grad(), evaluating(model):
            for logits, labels in labelled_logits(model, batches):
                add([logits.double()], labels)
    return LossSums(*(torch.stack(values).sum(0) for values in zip(*batched, strict=True)))


def _row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of every row at every temperature, ``[temperatures, rows]``."""
    losses = [nn.functional.cross_entropy(logits / t, labels, reduction="none") for t in TEMPERATURES]
    return torch.stack(losses).nan_to_num(LARGEST_LOSS).clamp(0, LARGEST_LOSS)


def best_temperature(sums: LossSums) -> float:
    """Return the temperature with the smallest loss of the first head; at a tie the one nearest to 1."""
    return TEMPERATURES[smallest(sums.losses[0])]


def smallest(losses: Tensor) -> int:
    """Return the place of the smallest of ``losses [temperatures]``; at a tie the one nearest to 1.

    >>> smallest(torch.tensor([9.0, 8.0, 8.0]))
    2
    """
    values = losses.tolist()
    return min(range(len(values)), key=lambda place: (values[place], abs(place - ONE)))


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
