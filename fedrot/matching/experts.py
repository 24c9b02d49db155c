"""Matching of a mixture's experts: their order, and that of the neurons inside each.

The score of client expert ``j`` at anchor expert ``i`` is the similarity of their
router rows plus the similarity of their neurons in the best order, which is another
assignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import cast

import torch
from torch import Tensor

from fedrot.matching.assignment import (
    Assigned,
    assignment,
    best_assignment,
    certified,
    identities_certified,
    joined,
    row_distances,
    separation,
    summed,
)
from fedrot.matching.pairs import Pair, by_sign
from fedrot.matching.problem import Match, Problem, each, match_by, solves, tensors_of
from fedrot.symmetry.describe.mixture import ExpertNeurons, ExpertPermutation
from fedrot.symmetry.groups import Group


@dataclass(frozen=True)
class _Pool:
    """The neurons of all experts as pairs of blocks ``[experts, n, rest]``.

    Blocks in ``signed`` change their sign with the neuron, blocks in ``plain`` do not.
    """

    plain: list[Pair]
    signed: list[Pair]

    def scores(
        self,
        i: int,
        j: int,
    ) -> tuple[Tensor, Tensor]:
        """Return similarities ``[n, n]``: anchor expert ``i``, client expert ``j``."""
        sides = (self.plain, self.signed)
        plain, signed = (summed(a[i] @ c[j].mT for a, c in side) for side in sides)
        return plain, signed

    def bound(
        self,
        i: int,
        j: int,
    ) -> Tensor:
        """Return an upper bound of ``worth``: every neuron gets its best partner."""
        plain, signed = self.scores(i, j)
        return (plain + signed.abs()).amax(1).double().sum()

    def worth(
        self,
        i: int,
        j: int,
    ) -> float:
        """Return the similarity of two experts whose neurons are in the best order."""
        plain, signed = self.scores(i, j)
        _, gain = assignment(plain, signed)
        return float((plain + signed).diagonal().double().sum()) + gain / 2


@solves(ExpertPermutation)
@each
def match_experts(
    group: Group,
    problem: Problem,
) -> Match:
    """Assign experts by the similarity of router rows and of ordered neurons."""
    neurons = next(g for g in problem.symmetry.groups if g.within == group.name)
    inside = tensors_of([neurons])
    blocks = problem.pairs(group)
    router = list(compress(blocks, [slot.tensor not in inside for slot in group.slots]))
    before = problem.distance(group, blocks)
    bound = separation([a for a, _ in router])
    distances = row_distances(problem.pairs(neurons))
    routed = row_distances(router)
    if certified(routed, bound) and _in_place(neurons, distances, problem):
        return Match(None, before, before, certified=routed)
    scores = summed((a @ c.mT).double() for a, c in router).cpu()
    element, gain = _best_order(_pool(neurons, problem), scores)
    return match_by(group, blocks, before, element, gain)


def _in_place(
    neurons: Group,
    distances: Tensor,
    problem: Problem,
) -> bool:
    """Return whether the identity is best, even if neurons could change experts."""
    bound = partial(problem.anchor.separation, neurons)
    return identities_certified([distances], [bound])[0]


def _pool(
    neurons: Group,
    problem: Problem,
) -> _Pool:
    action = cast(ExpertNeurons, neurons.action)
    size = (action.experts, action.n)
    pairs = problem.pairs(neurons)
    blocks = [(a.unflatten(0, size), c.unflatten(0, size)) for a, c in pairs]
    return _Pool(*by_sign(neurons, blocks))


def _best_order(
    pool: _Pool,
    routed: Tensor,
) -> Assigned:
    """Return the best order of the experts, and the decrease of the squared distance.

    ``routed`` are the similarities of the router rows, on the CPU.

    The worth of a pair costs an assignment of all neurons. It is computed only for
    pairs that the best order uses; the other scores are upper bounds.
    """
    experts = range(len(routed))
    bounds = torch.stack([pool.bound(i, j) for i in experts for j in experts])
    scores = bounds.cpu().view_as(routed)
    exact: set[tuple[int, int]] = set()
    missing = [(i, i) for i in experts]
    while True:
        for i, j in missing:
            scores[i, j] = pool.worth(i, j)
        exact.update(missing)
        element, gain = best_assignment(scores + routed)
        if element is None:
            return None, gain
        used = enumerate(element.tolist())
        missing = [pair for pair in used if pair not in exact]
        if not missing:
            return element.to(pool.signed[0][1].device), gain


@solves(ExpertNeurons)
@each
def match_expert_neurons(
    group: Group,
    problem: Problem,
) -> Match:
    """Assign the neurons inside each expert, unless distances certify the identity."""
    distances = row_distances(problem.pairs(group))
    before = problem.finite(float(distances.sum()), group)
    if _in_place(group, distances, problem):
        return Match(None, before, before, certified=distances)
    action = cast(ExpertNeurons, group.action)
    pool = _pool(group, problem)
    orders = [assignment(*pool.scores(i, i)) for i in range(action.experts)]
    # An order with signs counts from 1: -2 is the second neuron, negated.
    order, gain = joined(orders, torch.arange(1, action.n + 1))
    element = order.to(distances.device) if gain > 0 else None
    return Match(element, before, max(before - gain, 0.0), gain)
