"""Matching of a mixture's experts: their order, and the order of the neurons inside
each.

The score of client expert ``j`` at anchor expert ``i`` is the similarity of their
router rows plus the similarity of their neurons in the best order, which is another
assignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fedrot.matching import assignment
from fedrot.matching.problem import (
    Match,
    Pair,
    Problem,
    by_sign,
    solves,
    squared_distance,
)
from fedrot.symmetry.describe.mixture import ExpertNeurons, ExpertPermutation
from fedrot.symmetry.groups import Group


@dataclass(frozen=True)
class _Pool:
    """The neurons of all experts as pairs of blocks ``[experts, n, rest]``.

    Blocks in ``signed`` change their sign with the neuron, blocks in ``plain`` do not.
    """

    plain: list[Pair]
    signed: list[Pair]

    def scores(self, i: int, j: int) -> tuple[Tensor, Tensor]:
        """Return the similarities ``[n, n]`` of anchor expert ``i`` and client expert
        ``j``.
        """
        plain, signed = (
            sum((a[i] @ c[j].mT for a, c in side), start=torch.zeros(()))
            for side in (self.plain, self.signed)
        )
        return plain, signed

    def bound(self, i: int, j: int) -> Tensor:
        """Return an upper bound of ``worth``: every neuron of the anchor gets its best
        partner.
        """
        plain, signed = self.scores(i, j)
        return (plain + signed.abs()).amax(1).double().sum()

    def worth(self, i: int, j: int) -> float:
        """Return the similarity of two experts whose neurons are in the best order."""
        plain, signed = self.scores(i, j)
        _, gain = assignment.assignment(plain, signed)
        return float((plain + signed).diagonal().double().sum()) + gain / 2


@solves(ExpertPermutation)
def match_experts(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Assign experts by the similarity of their router rows and of their neurons in the
    best order.
    """
    return [_match(group, problem) for group in groups]


def _match(group: Group, problem: Problem) -> Match:
    neurons = next(g for g in problem.symmetry.groups if g.within == group.name)
    inside = {slot.tensor for slot in neurons.slots}
    blocks = problem.pairs(group)
    router = [
        b
        for slot, b in zip(group.slots, blocks, strict=True)
        if slot.tensor not in inside
    ]
    before = after = problem.distance(group, blocks)
    bound = assignment.separation([a for a, _ in router])
    distances = assignment.row_distances(problem.pairs(neurons))
    routed = assignment.row_distances(router)
    if bool(assignment.certified(routed, bound)) and _in_place(
        neurons, distances, problem
    ):
        return Match(None, before, before, certified=routed)
    scores = torch.stack([(a @ c.mT).double() for a, c in router]).sum(0)
    element, gain = _best_order(_pool(neurons, problem), scores)
    if element is not None:
        after = float(
            squared_distance([(a, group.action.act(element, c, 0)) for a, c in blocks])
        )
    return Match(element, before, after, gain)


def _in_place(neurons: Group, distances: Tensor, problem: Problem) -> bool:
    """Return whether the identity is the best order, even of neurons that may change
    experts.
    """
    bound = partial(problem.anchor.separation, neurons)
    return assignment.identities_certified([distances], [bound])[0]


def _pool(neurons: Group, problem: Problem) -> _Pool:
    action = cast(ExpertNeurons, neurons.action)
    size = (action.experts, action.n)
    blocks = [
        (a.unflatten(0, size), c.unflatten(0, size)) for a, c in problem.pairs(neurons)
    ]
    return _Pool(*by_sign(neurons, blocks))


def _best_order(pool: _Pool, routed: Tensor) -> tuple[Tensor | None, float]:
    """Return the best order of the experts, and the decrease of the squared distance.

    The worth of a pair costs an assignment of all neurons. It is computed only for
    pairs that the best order uses; the other scores are upper bounds.
    """
    experts, routed = range(len(routed)), routed.cpu()
    scores = (
        torch.stack([pool.bound(i, j) for i in experts for j in experts])
        .cpu()
        .view_as(routed)
    )
    scores.diagonal().copy_(
        torch.tensor([pool.worth(i, i) for i in experts], dtype=torch.float64)
    )
    exact = torch.eye(len(routed), dtype=torch.bool)
    while True:
        element, gain = assignment.best_assignment(scores + routed)
        used = [] if element is None else list(enumerate(element.tolist()))
        missing = [(i, j) for i, j in used if not exact[i, j]]
        if not missing:
            place = pool.signed[0][1].device
            return None if element is None else element.to(place), gain
        for i, j in missing:
            scores[i, j], exact[i, j] = pool.worth(i, j), True


@solves(ExpertNeurons)
def match_expert_neurons(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Assign the neurons inside each expert, unless distances certify the identity."""
    matches = []
    for group in groups:
        distances = assignment.row_distances(problem.pairs(group))
        before = problem.finite(float(distances.sum()), group)
        if _in_place(group, distances, problem):
            matches.append(Match(None, before, before, certified=distances))
            continue
        action, pool = cast(ExpertNeurons, group.action), _pool(group, problem)
        found = [
            assignment.assignment(*pool.scores(i, i)) for i in range(action.experts)
        ]
        gain = sum(gained for _, gained in found)
        still = torch.arange(1, action.n + 1)
        orders = [still if element is None else element.cpu() for element, _ in found]
        place = pool.signed[0][1].device
        element = torch.stack(orders).to(place) if gain > 0 else None
        matches.append(Match(element, before, max(before - gain, 0.0), gain))
    return matches
