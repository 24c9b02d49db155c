"""Losses of task heads, which clients sum over held-out rows, and temperatures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.task_head.fit import with_task_head
from fedrot.task_head.labelled_rows import labelled_rows
from fedrot.task_head.outputs import OUTPUT_KINDS, problem_type_of
from fedrot.task_head.sums import unlike
from fedrot.tensors import TensorDict, Tensors

#: From 1/4 to 16, each 9 % above the one before; 1 is among them.
TEMPERATURES = tuple(2.0 ** (step / 8) for step in range(-16, 33))

#: The place of 1 among them.
ONE = TEMPERATURES.index(1.0)


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over labelled rows of the losses of a classifier, or of several task heads.

    Sums of clients add up (``+``).

    Attributes:
        losses: summed losses at each of ``TEMPERATURES``, float64 ``[heads,
            temperatures]``: cross entropy; of several labels the sum of their binary
            cross entropies; in a regression the sum over outputs of squared errors, in
            the units of ``TaskHeads``, at every temperature the same.
        squares: summed squares of the differences of a row's losses of each head and of
            another head, float64 ``[heads, temperatures]``; see ``TaskHeads``.
        counts: number of rows, and rows that each head predicts as they are labelled
            (in a regression none), float64 ``[1 + heads]``.

    Raises:
        UpdateError: another dtype or shape; negative numbers, NaN or Inf; no rows; or
            more correct rows than rows.
    """

    losses: Tensor
    squares: Tensor
    counts: Tensor

    def __post_init__(self) -> None:
        heads = len(self.counts) - 1
        grid = (heads, len(TEMPERATURES))
        shapes = {"losses": grid, "squares": grid, "counts": (1 + heads,)}
        for name, shape in shapes.items():
            value: Tensor = getattr(self, name)
            reason = unlike(value, shape)
            if reason or bool((value < 0).any()):
                raise UpdateError(f"The {name} {reason or 'are negative'}.")
        if not self.rows >= 1 or bool((self.counts > self.rows).any()):
            raise UpdateError(
                f"{self.counts[1:].tolist()} of {self.rows} rows are counted as "
                "correct."
            )

    @property
    def rows(self) -> float:
        """Number of rows."""
        return float(self.counts[0])

    def __add__(self, other: LossSums) -> LossSums:
        """Return the sums over the rows of both.

        Raises:
            UpdateError: the sums have different numbers of heads.
        """
        if len(self.counts) != len(other.counts):
            raise UpdateError(
                "Losses are of different numbers of heads; use the same at all clients."
            )
        return LossSums(
            self.losses + other.losses,
            self.squares + other.squares,
            self.counts + other.counts,
        )


class TaskHeads(NamedTuple):
    """Task heads for one model, in place of its own.

    Attributes:
        weight: ``[heads, outputs, inputs]``.
        bias: ``[heads, outputs]``.
        partner: int64 ``[heads]``: the head of the same model, by place, whose losses
            at the same temperature are subtracted in ``LossSums.squares``; -1 for the
            old head at temperature 1.
        units: of the labels of a regression, by which errors are divided, ``[outputs]``
            or ``[1]``.
    """

    weight: Tensor
    bias: Tensor
    partner: Tensor
    units: Tensor = torch.ones(1)

    def logits(self, features: Tensor, outputs: int) -> Tensor:
        """Return the logits of each head, ``[heads, rows, outputs]``.

        Raises:
            FedrotError: a shape or a partner is wrong.
        """
        count = len(self.partner)
        shape = (outputs, features.shape[1])
        fits = self.weight.shape == (count, *shape)
        fits = fits and self.bias.shape == (count, outputs)
        partners = {*self.partner.tolist()}
        if not (count and fits and partners <= {*range(-1, count)}):
            raise FedrotError(
                f"Weights {list(self.weight.shape)}, biases {list(self.bias.shape)} "
                f"and partners {self.partner.tolist()} of heads do not fit a layer of "
                f"shape {list(shape)}."
            )
        return features @ self.weight.to(features).mT + self.bias.to(
            features
        ).unsqueeze(1)


class _OldLosses(NamedTuple):
    """A batch's labels, and the losses of its rows by the old head at temperature 1."""

    labels: Tensor
    losses: Tensor


def compare_losses(
    models: Iterable[nn.Module],
    batches: Sequence[Tensors],
    task_head: str,
    task_heads: Sequence[TaskHeads],
    problem_type: str | None = None,
) -> LossSums:
    """Return the losses of task heads of several models on a client's held-out rows.

    Heads are in the order of the models; the first head of the first model is the old
    one.

    Args:
        models: drawn one after the other: an iterable may yield one model with other
            weights each time.
        batches: see ``collect_losses``; the same rows in the same order for each model.
        task_head: the name of the last linear layer, from
            ``fedrot.task_head.task_head_of``.
        task_heads: of each model.
        problem_type: a problem_type; None for that of ``model.config``.

    Example: ``compare_losses([model], held_out, "classifier", [TaskHeads(*layers)])``

    Raises:
        FedrotError: see ``collect_losses``; heads do not fit the layer, or rows come in
            another order.
    """
    old: list[_OldLosses] = []
    sums = [
        _losses(model, batches, problem_type, old, task_head, heads)
        for heads, model in zip(task_heads, models, strict=True)
    ]
    rows = sums[0].counts[:1]
    return LossSums(
        torch.cat([part.losses for part in sums]),
        torch.cat([part.squares for part in sums]),
        torch.cat([rows, *(part.counts[1:] for part in sums)]),
    )


def collect_losses(
    model: nn.Module, batches: Iterable[Tensors], problem_type: str | None = None
) -> LossSums:
    """Return a model's summed losses on a client's held-out rows, at every temperature.

    A row's loss is at most the kind's ``largest_loss``, also if logits are not finite.
    Squares are of differences to the loss at temperature 1.

    Args:
        model: a ``transformers`` classifier; it is run in evaluation mode, without
            gradients, and is not changed.
        batches: see ``fedrot.task_head.collect_classes``.
        problem_type: a problem_type; None for that of ``model.config``.

    Example: ``sums = collect_losses(model, held_out)``

    Raises:
        FedrotError: the batches have no labels for the model.
    """
    return _losses(model, batches, problem_type, [])


def _losses(
    model: nn.Module,
    batches: Iterable[Tensors],
    problem_type: str | None,
    old: list[_OldLosses],
    task_head: str = "",
    task_heads: TaskHeads | None = None,
) -> LossSums:
    """Return the losses of one model's heads, or of its own head.

    Args:
        old: of each batch; the first model adds those of its first head.
    """
    kind_name = problem_type_of(getattr(model, "config", {}), problem_type)
    kind = OUTPUT_KINDS[kind_name]
    is_first = not old
    partner = task_heads.partner if task_heads else torch.tensor([-1])
    losses, squares, counts = list[Tensor](), list[Tensor](), list[Tensor]()
    for rows, labels, outputs in labelled_rows(model, batches, kind_name, task_head):
        logits = task_heads.logits(rows, outputs) if task_heads else rows.unsqueeze(0)
        if task_heads and labels.is_floating_point():
            units = task_heads.units.to(labels)
            logits, labels = logits / units, labels / units
        by_temperature = [kind.loss(logits, labels, t) for t in TEMPERATURES]
        by_row = torch.stack(by_temperature, 1).nan_to_num(kind.largest_loss)
        by_row = by_row.clamp(0, kind.largest_loss).cpu()
        if is_first:
            old.append(_OldLosses(labels.cpu(), by_row[0, ONE]))
        before = old[len(losses)]
        if not torch.equal(before.labels, labels.cpu()):
            raise FedrotError(
                "The held-out rows of two models differ. Give a list of batches, so "
                "that each model reads the same rows in the same order."
            )
        of_old = (partner < 0).reshape(-1, 1, 1)
        others = by_row[partner.clamp(min=0)]
        others = torch.where(of_old, before.losses, others)
        right = kind.right(logits, labels).sum(1).cpu()
        losses.append(by_row.sum(2))
        squares.append((by_row - others).square().sum(2))
        counts.append(torch.cat([torch.tensor([len(rows)]), right]).double())
    parts = (losses, squares, counts)
    return LossSums(*(torch.stack(batch_sums).sum(0) for batch_sums in parts))


def best_temperature(sums: LossSums) -> float:
    """Return the temperature with the smallest loss of the first head.

    At a tie it is the one nearest to 1.
    """
    return TEMPERATURES[smallest(sums.losses[0])]


def smallest(losses: Tensor) -> int:
    """Return the place of the smallest of ``losses [temperatures]``.

    At a tie it is the one nearest to 1.

    >>> smallest(torch.tensor([9.0, 8.0, 8.0]))
    2
    """
    values = losses.tolist()
    return min(range(len(values)), key=lambda place: (values[place], abs(place - ONE)))


def with_temperature(
    tensors: Tensors, task_head: str, temperature: float
) -> TensorDict:
    """Return a classifier's tensors with its logits divided by a temperature.

    Weight and bias of the last layer are divided; the other tensors are the same
    objects.

    Args:
        tensors: a state dict.
        task_head: the name of the last linear layer, from
            ``fedrot.task_head.task_head_of``.

    Example: ``with_temperature(model.state_dict(), "score", best_temperature(total))``

    Raises:
        FedrotError: the temperature is not positive, or there is no such layer.
    """
    if not 0 < temperature < math.inf:
        raise FedrotError(
            f"The temperature is {temperature}; it must be positive and finite."
        )
    if f"{task_head}.weight" not in tensors:
        raise FedrotError(
            f"The model has no layer '{task_head}'; see fedrot.task_head.task_head_of."
        )
    weight = tensors[f"{task_head}.weight"].double() / temperature
    bias = tensors.get(f"{task_head}.bias", torch.zeros(())).double() / temperature
    return with_task_head(tensors, task_head, weight, bias)


def temperature_in_words(temperature: float) -> str:
    """Return ``temperature 6.17 (over-confident before logits were divided by it)``."""
    confidence = "over" if temperature > 1 else "under"
    effect = f"{confidence}-confident before logits were divided by it"
    if 0.8 <= temperature <= 1.25:
        effect = "near 1: no correction was needed"
    return f"temperature {temperature:.2f} ({effect})"
