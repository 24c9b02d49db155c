"""The temperature of a merged classifier, chosen by losses that clients sum over held-out rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedrot.collect.head_inputs import read_inputs
from fedrot.collect.hooks import evaluating
from fedrot.collect.labelled import labelled_logits
from fedrot.errors import FedrotError, UpdateError
from fedrot.head import with_head
from fedrot.problems import PROBLEMS, Problem, problem_for
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
        losses: summed losses at each of ``TEMPERATURES``, float64 ``[heads, temperatures]``: cross
            entropy; of several labels the sum of their binary cross entropies; in a regression the sum
            over outputs of squared errors, at every temperature the same.
        squares: summed squares of the differences of a row's losses of each head and of another head,
            float64 ``[heads, temperatures]``; see ``Heads``.
        counts: number of rows, and rows that each head predicts as they are labelled (in a regression
            none), float64 ``[1 + heads]``.

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


class Heads(NamedTuple):
    """Task heads for one model, in place of its own.

    Attributes:
        weight: ``[heads, outputs, inputs]``.
        bias: ``[heads, outputs]``.
        partner: int64 ``[heads]``: the head of the same model, by place, whose losses at the same
            temperature are subtracted in ``LossSums.squares``; -1 for the old head at temperature 1.
    """

    weight: Tensor
    bias: Tensor
    partner: Tensor


def compare_losses(
    models: Iterable[nn.Module],
    batches: Sequence[Tensors],
    head: str,
    heads: Sequence[Heads],
    problem: str | None = None,
) -> LossSums:
    """Return the summed losses of task heads of several models on a client's held-out rows.

    The first head of the first model is the old one.

    Args:
        models: classifiers as in ``collect_losses``, drawn one after the other: an iterable may yield
            one model with other weights each time.
        batches: as in ``collect_losses``, with the same rows in the same order for each model.
        head: the name of the last linear layer, from ``fedrot.head.head_of``.
        heads: of each model.
        problem: a problem_type; None for that of ``model.config``.

    Returns:
        The sums of all heads, those of the first model first.

    Example: ``compare_losses([old, new], held_out, "classifier", [Heads(*of_old), Heads(*of_new)])``

    Raises:
        FedrotError: as in ``collect_losses``; the heads do not fit the layer, a partner is no head, or
            the rows come in another order.
    """
    drawn, old, found = iter(models), list[tuple[Tensor, Tensor]](), list[LossSums]()
    for own in heads:
        model = next(drawn, None)
        if model is None:
            raise FedrotError(f"There are heads for {len(heads)} models, but {len(found)} models.")
        found.append(_compared(model, batches, head, own, problem, old))
    if not found:
        raise FedrotError("There are no heads to compare; give those of at least one model.")
    losses, squares = (torch.cat([getattr(o, name) for o in found]) for name in ("losses", "squares"))
    counts = torch.cat([found[0].counts[:1], *(one.counts[1:] for one in found)])
    return LossSums(losses, squares, counts)


def collect_losses(model: nn.Module, batches: Iterable[Tensors], problem: str | None = None) -> LossSums:
    """Return a model's summed losses on a client's held-out rows, at every temperature.

    A row's loss is at most ``LARGEST_LOSS``, also if logits are not finite. The squares are of the
    differences to temperature 1.

    Args:
        model: a ``transformers`` classifier; it is run in evaluation mode, without gradients, and is
            not changed.
        batches: keyword arguments of the model's forward, with ``labels`` as in
            ``fedrot.head.collect_classes``.
        problem: a problem_type; None for that of ``model.config``.

    Example: ``sums = collect_losses(model, held_out)``

    Raises:
        FedrotError: the batches have no labels for the model.
    """
    problem, own = problem_for(model, problem), torch.tensor([-1])
    kind, sums = PROBLEMS[problem], list[_Sums]()
    with torch.no_grad(), evaluating(model):
        for logits, labels in labelled_logits(model, batches, problem):
            losses = _row_losses(kind, logits.double().unsqueeze(0), labels)
            sums.append(_summed(losses, kind.right(logits.unsqueeze(0), labels), own, losses[0, ONE]))
    return _total(sums)


#: Sums over the rows of a batch: losses, squares and counts.
_Sums = tuple[Tensor, Tensor, Tensor]


def _compared(
    model: nn.Module,
    batches: Iterable[Tensors],
    head: str,
    heads: Heads,
    problem: str | None,
    old: list[tuple[Tensor, Tensor]],
) -> LossSums:
    """Return the losses of one model's heads.

    ``old`` has the labels of each batch and the losses of the old head; the first model adds them.
    """
    problem, first, sums = problem_for(model, problem), not old, list[_Sums]()

    def add(features: Tensor, labels: Tensor, outputs: int) -> None:
        _check_heads(heads, (outputs, features.shape[1]), head)
        logits = features @ heads.weight.to(features).mT + heads.bias.to(features).unsqueeze(1)
        losses = _row_losses(PROBLEMS[problem], logits, labels)
        if first:
            old.append((labels.cpu(), losses[0, ONE].cpu()))
        same = len(sums) < len(old) and torch.equal(old[len(sums)][0], labels.cpu())
        if not same:
            raise _other_rows()
        right = PROBLEMS[problem].right(logits, labels)
        sums.append(_summed(losses, right, heads.partner, old[len(sums)][1]))

    read_inputs(model, batches, head, problem, add)
    if len(sums) != len(old):
        raise _other_rows()
    return _total(sums)


def _other_rows() -> FedrotError:
    return FedrotError(
        "The held-out rows of two models differ. Give a list of batches, so that each model reads the "
        "same rows in the same order."
    )


def _check_heads(heads: Heads, shape: tuple[int, int], head: str) -> None:
    """Raise ``FedrotError`` if heads do not fit a layer ``[outputs, inputs]``."""
    count, partner = len(heads.weight), heads.partner
    shapes = [tuple(value.shape) for value in heads]
    if not count or shapes != [(count, *shape), (count, shape[0]), (count,)]:
        raise FedrotError(
            f"The heads' weight, bias and partner have shapes {', '.join(map(str, shapes))}; the layer "
            f"'{head}' has {shape}. Stack one weight, bias and partner for each head."
        )
    if partner.dtype != torch.int64 or bool(((partner < -1) | (partner >= count)).any()):
        raise FedrotError(
            f"The partners are {partner.dtype} {partner.tolist()}; give int64 places of heads from 0 to "
            f"{count - 1}, or -1 for the old head."
        )


def _row_losses(kind: Problem, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of every row at every temperature, ``[heads, temperatures, rows]``."""
    losses = torch.stack([kind.loss(logits, labels, t) for t in TEMPERATURES], 1)
    return losses.nan_to_num(LARGEST_LOSS).clamp(0, LARGEST_LOSS)


def _summed(losses: Tensor, right: Tensor, partner: Tensor, old: Tensor) -> _Sums:
    """Return the sums over the rows of a batch."""
    partner = partner.to(losses.device)
    without = (partner < 0).reshape(-1, 1, 1)
    other = torch.where(without, old.to(losses), losses[partner.clamp(min=0)])
    counts = torch.cat([right.new_tensor([losses.shape[2]], dtype=torch.float64), right.double().sum(1)])
    return losses.sum(2).cpu(), (losses - other).square().sum(2).cpu(), counts.cpu()


def _total(sums: Sequence[_Sums]) -> LossSums:
    return LossSums(*(torch.stack(values).sum(0) for values in zip(*sums, strict=True)))


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
