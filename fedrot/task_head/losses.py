"""The temperature of a merged classifier, chosen by losses that clients sum over
held-out rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.task_head.fit import with_task_head
from fedrot.task_head.outputs import OUTPUT_KINDS, Pair, problem_type_of
from fedrot.task_head.rows import labelled_rows
from fedrot.tensors import Tensors

#: From 1/4 to 16, each 9 % above the one before; 1 is among them.
TEMPERATURES = tuple(2.0 ** (step / 8) for step in range(-16, 33))

#: The place of 1 among them.
ONE = TEMPERATURES.index(1.0)

#: The largest loss of a row that counts, also for logits that are not finite.
LARGEST_LOSS = 1e6


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over labelled rows of the losses of a classifier, or of several task heads.

    Sums of clients add up (``+``).

    Attributes:
        losses: summed losses at each of ``TEMPERATURES``, float64 ``[heads,
            temperatures]``: cross entropy; of several labels the sum of their binary
            cross entropies; in a regression the sum over outputs of squared errors, at
            every temperature the same.
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
        grid = (len(self.counts) - 1, len(TEMPERATURES))
        for name, shape in {
            "losses": grid,
            "squares": grid,
            "counts": (1 + grid[0],),
        }.items():
            value: Tensor = getattr(self, name)
            if value.dtype != torch.float64 or tuple(value.shape) != shape:
                raise UpdateError(
                    f"The {name} are {value.dtype} {list(value.shape)}, not float64."
                )
            if not bool((torch.isfinite(value) & (value >= 0)).all()):
                raise UpdateError(f"The {name} are negative, NaN or Inf.")
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
        """Return the sums over the rows of both; raises ``UpdateError`` if they have
        other heads.
        """
        if len(self.counts) != len(other.counts):
            raise UpdateError(
                "Losses are of different numbers of heads; use the same at all clients."
            )
        pairs = (
            (getattr(self, name), getattr(other, name))
            for name in ("losses", "squares", "counts")
        )
        return LossSums(*(ours + theirs for ours, theirs in pairs))


class TaskHeads(NamedTuple):
    """Task heads for one model, in place of its own.

    Attributes:
        weight: ``[heads, outputs, inputs]``.
        bias: ``[heads, outputs]``.
        partner: int64 ``[heads]``: the head of the same model, by place, whose losses
            at the same temperature are subtracted in ``LossSums.squares``; -1 for the
            old head at temperature 1.
    """

    weight: Tensor
    bias: Tensor
    partner: Tensor

    def logits(self, features: Tensor, outputs: int) -> Tensor:
        """Return ``[heads, rows, outputs]``; raises ``FedrotError`` if a shape or a
        partner is wrong.
        """
        count, shape = len(self.partner), (outputs, features.shape[1])
        right = self.weight.shape == (count, *shape) and self.bias.shape == (
            count,
            outputs,
        )
        if not (count and right and {*self.partner.tolist()} <= {*range(-1, count)}):
            raise FedrotError(
                f"Weights {list(self.weight.shape)}, biases {list(self.bias.shape)} "
                f"and partners {self.partner.tolist()} of heads do not fit a layer of "
                f"shape {list(shape)}."
            )
        return features @ self.weight.to(features).mT + self.bias.to(
            features
        ).unsqueeze(1)


def compare_losses(
    models: Iterable[nn.Module],
    batches: Sequence[Tensors],
    task_head: str,
    task_heads: Sequence[TaskHeads],
    problem_type: str | None = None,
) -> LossSums:
    """Return the summed losses of task heads of several models on a client's held-out
    rows.

    TaskHeads are in the order of the models; the first head of the first model is the
    old one.

    Args:
        models: drawn one after the other: an iterable may yield one model with other
            weights each time.
        batches: see ``collect_losses``; the same rows in the same order for each model.
        task_head: the name of the last linear layer, from
            ``fedrot.task_head.task_head_of``.
        task_heads: of each model.
        problem_type: a problem_type; None for that of ``model.config``.

    Example: ``compare_losses([old, new], held_out, "classifier", [TaskHeads(*of_old),
    TaskHeads(*of_new)])``

    Raises:
        FedrotError: see ``collect_losses``; heads do not fit the layer, or rows come in
            another order.
    """
    old: list[Pair] = []
    pairs = zip(task_heads, models, strict=True)
    found = [
        _losses(model, batches, problem_type, old, task_head, own)
        for own, model in pairs
    ]
    losses, squares = (
        torch.cat([getattr(o, name) for o in found]) for name in ("losses", "squares")
    )
    return LossSums(
        losses,
        squares,
        torch.cat([found[0].counts[:1], *(o.counts[1:] for o in found)]),
    )


def collect_losses(
    model: nn.Module, batches: Iterable[Tensors], problem_type: str | None = None
) -> LossSums:
    """Return a model's summed losses on a client's held-out rows, at every temperature.

    A row's loss is at most ``LARGEST_LOSS``, also if logits are not finite. Squares are
    of differences to the loss at temperature 1.

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
    old: list[Pair],
    task_head: str = "",
    task_heads: TaskHeads | None = None,
) -> LossSums:
    """Return the losses of one model's heads, or of its own head.

    ``old`` has each batch's labels and losses of the old head; those of the first model
    are added.
    """
    name, first = problem_type_of(getattr(model, "config", {}), problem_type), not old
    sums: list[tuple[Tensor, ...]] = []
    for rows, labels, outputs in labelled_rows(model, batches, name, task_head):
        logits = task_heads.logits(rows, outputs) if task_heads else rows.unsqueeze(0)
        losses = torch.stack(
            [OUTPUT_KINDS[name].loss(logits, labels, t) for t in TEMPERATURES], 1
        )
        losses = losses.nan_to_num(LARGEST_LOSS).clamp(0, LARGEST_LOSS).cpu()
        if first:
            old.append((labels.cpu(), losses[0, ONE]))
        same, before = old[len(sums)]
        if not torch.equal(same, labels.cpu()):
            raise FedrotError(
                "The held-out rows of two models differ. Give a list of batches, so "
                "that each model reads the same rows in the same order."
            )
        partner = task_heads.partner if task_heads else torch.tensor([-1])
        other = losses[partner.clamp(min=0)]
        other = torch.where((partner < 0).reshape(-1, 1, 1), before, other)
        right = OUTPUT_KINDS[name].right(logits, labels).sum(1).cpu()
        counts = torch.cat([torch.tensor([len(rows)]), right]).double()
        sums.append((losses.sum(2), (losses - other).square().sum(2), counts))
    return LossSums(*(torch.stack(each).sum(0) for each in zip(*sums, strict=True)))


def best_temperature(sums: LossSums) -> float:
    """Return the temperature with the smallest loss of the first head; at a tie the one
    nearest to 1.
    """
    return TEMPERATURES[smallest(sums.losses[0])]


def smallest(losses: Tensor) -> int:
    """Return the place of the smallest of ``losses [temperatures]``; at a tie the one
    nearest to 1.

    >>> smallest(torch.tensor([9.0, 8.0, 8.0]))
    2
    """
    values = losses.tolist()
    return min(range(len(values)), key=lambda place: (values[place], abs(place - ONE)))


def with_temperature(
    tensors: Tensors, task_head: str, temperature: float
) -> dict[str, Tensor]:
    """Return a classifier's tensors with its logits divided by a temperature.

    Weight and bias of the last layer are divided; the other tensors are the same
    objects.

    Args:
        tensors: a state dict.
        task_head: the name of the last linear layer, from
            ``fedrot.task_head.task_head_of``.

    Example: ``cooled = with_temperature(model.state_dict(), head,
    best_temperature(total))``

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
