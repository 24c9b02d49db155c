"""The choice among a model and models with fitted task heads, by losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from fedrot.task_head.covariance import class_means
from fedrot.task_head.fit import fitted_task_heads
from fedrot.task_head.losses import TEMPERATURES, TaskHeads, compare_losses
from fedrot.task_head.sums import ClassSums
from fedrot.task_head.votes import Change, Votes
from fedrot.tensors import Tensors

#: Shrinkages of the covariance among which held-out rows choose.
SHRINKAGES = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)

#: The largest logit of the mean of a class or label in a head that clients compare.
#: At the largest of the ``TEMPERATURES`` it is 16, so that a few wrong rows do not cost
#: more than all others gain.
LARGEST_LOGIT = TEMPERATURES[-1] ** 2

#: The shrinkage at which groups of clients are compared.
REFERENCE = 0.3


#: A body: all of a model but its task head, or what stands for it.
B = TypeVar("B")


@dataclass(frozen=True, eq=False)
class Candidate(Generic[B]):
    """A body with a task head.

    Attributes:
        body: see ``B``.
        weight: of the head, ``[classes, inputs]``.
        bias: of the head, ``[classes]``.
        share: how much of a round's change the body has: 0, 0.5 or 1.
        shrinkage: of a fitted head; NaN for a model's own head.
        divisor: by which the logits of a fitted head are divided already.
        priors: in the bias of a fitted head, see ``OutputKind.priors``.
    """

    body: B
    weight: Tensor
    bias: Tensor
    share: float = 1.0
    shrinkage: float = math.nan
    divisor: float = 1.0
    priors: Tensor | None = None

    @property
    def fitted(self) -> bool:
        """Whether the head is a fitted one."""
        return not math.isnan(self.shrinkage)


def with_fitted_task_heads(
    like: Candidate[B],
    sums: ClassSums,
    shrinkages: Sequence[float],
    bias: bool,
    priors: Tensor | None = None,
) -> list[Candidate[B]]:
    """Return a candidate's body with heads of all shrinkages that are fitted to sums.

    Classes that are far apart beside their deviations have logits of any size: logits
    above ``LARGEST_LOGIT`` are divided, except in a regression. Outputs of which the
    sums tell nothing keep the directions of the candidate's own head.

    Raises:
        UpdateError: see ``fitted_task_heads``.
    """
    weights, biases = fitted_task_heads(sums, shrinkages, bias, priors)
    divisors = torch.ones(len(shrinkages)).to(weights)
    if sums.kind.has_temperature:
        present = sums.counts > 0
        means = class_means(sums.counts, sums.sums)[present]
        logits = means @ weights.mT + biases.unsqueeze(1)
        divisors = (logits.abs().amax((1, 2)) / LARGEST_LOGIT).clamp(min=1)
    weights = weights / divisors.reshape(-1, 1, 1) + _kept_directions(like, sums)
    biases = biases / divisors.unsqueeze(1)
    heads = zip(weights, biases, shrinkages, divisors.tolist(), strict=True)
    shares = sums.kind.priors(sums.counts if priors is None else priors)
    return [
        Candidate(like.body, weight, bias, like.share, shrinkage, divisor, shares)
        for weight, bias, shrinkage, divisor in heads
    ]


def _kept_directions(like: Candidate[B], sums: ClassSums) -> Tensor:
    """Return weights ``[outputs, inputs]`` that are 0 for outputs with rows.

    The others are those of the head before, beside the mean of the classes with rows.
    They do not change the logit of a row with mean features, which
    ``fitted_task_heads`` sets to that of half a row.
    """
    kept = like.weight.double()
    if sums.kind.by_class:
        kept = kept - sums.counts @ kept / sums.rows
    mean = sums.sums[sums.kind.centres].sum(0)
    mean = mean / mean.norm().clamp(min=1e-30)
    kept = kept - torch.outer(kept @ mean, mean)
    return kept.where(sums.absent.unsqueeze(1), 0.0)


def keep_absent(
    candidates: Sequence[Candidate[B]], like: Sequence[Candidate[B]], absent: Tensor
) -> None:
    """Set the outputs of which sums tell nothing to those of other candidates.

    Args:
        candidates: their tensors are changed.
        like: one for each candidate, or one for all.
        absent: bool ``[outputs]``.
    """
    others = like if len(like) == len(candidates) else [*like] * len(candidates)
    for candidate, other in zip(candidates, others, strict=True):
        candidate.weight[absent] = other.weight[absent].to(candidate.weight)
        candidate.bias[absent] = other.bias[absent].to(candidate.bias)
        shares, before = candidate.priors, other.priors
        if shares is not None and before is not None and bool(absent.any()):
            shares[absent] = before[absent]


def votes_on(
    candidates: Sequence[Candidate[B]],
    model: nn.Module,
    held_out: Sequence[Tensors],
    task_head: str,
    sums: ClassSums,
) -> Votes:
    """Return the votes of one client on heads of its model; the first is the old one.

    Losses of a regression are in the units of the labels in ``sums``.
    """
    heads = TaskHeads(
        torch.stack([candidate.weight for candidate in candidates]),
        torch.stack([candidate.bias for candidate in candidates]),
        torch.full((len(candidates),), -1),
        sums.kind.units(sums.counts),
    )
    losses = compare_losses([model], held_out, task_head, [heads], sums.problem_type)
    return Votes([losses], candidates)


@dataclass(frozen=True, eq=False)
class Choice(Generic[B]):
    """The candidate that is taken, and the best one except the old model.

    Attributes:
        taken: the best candidate if it is better than the old model, else the old one.
        temperature: the divisor of its logits.
        best: the candidate with the lowest loss, each at its best temperature.
        change: of the loss, from the old model to the best candidate.
    """

    taken: Candidate[B]
    temperature: float
    best: Candidate[B]
    change: Change


def choose(
    votes: Votes, old: Candidate[B], candidates: Sequence[Candidate[B]]
) -> Choice[B]:
    """Return the choice among the old model and candidates, all of them in the votes.

    Candidates are compared by ``Change.decisive``, each at its best temperature.
    """
    changes = {candidate: votes.from_old(candidate) for candidate in candidates}
    best = min(candidates, key=lambda candidate: changes[candidate].decisive)
    taken = best if changes[best].decisive < 0 else old
    return Choice(taken, TEMPERATURES[votes.temperature(taken)], best, changes[best])


def reference_among(candidates: Sequence[Candidate[B]]) -> Candidate[B]:
    """Return the candidate of the shrinkage ``REFERENCE``, else the first one."""
    for candidate in candidates:
        if candidate.shrinkage == REFERENCE:
            return candidate
    return candidates[0]
