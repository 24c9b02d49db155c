"""Solvers for permutations of units: neurons, hidden units of task heads, the residual
stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fedrot.matching import assignment
from fedrot.matching.problem import COUPLED, Match, Pair, Problem, by_sign, solves
from fedrot.symmetry.actions import Permutation
from fedrot.symmetry.groups import Group, Move
from fedrot.symmetry.signs import SignedPermutation


@solves(Permutation, SignedPermutation)
def match_units(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Assign units, with signs if the action has signs."""
    if groups and groups[0].part in COUPLED:
        return _match_across_layers(groups, problem)
    return _match_neurons(groups, problem)


def _match_across_layers(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Match one group after another, because groups may share tensors.

    A tensor with two axes in the group depends on the element twice. While one axis is
    matched, the other is held fixed; the element is kept only if the objective falls.
    """
    matches = []
    for group in groups:
        blocks = problem.pairs(group)
        before = problem.finite(problem.total([group]), group)
        scores = _scores(group, blocks, problem.evidence(group, blocks))
        element, gain = assignment.best_assignment(*scores)
        if element is not None:
            moved = problem.moved([Move(group, element)])
            if max(Counter(slot.tensor for slot in group.slots).values()) > 1:
                gain = problem.objective([group]) - moved.objective([group])
            if gain > 0:
                matches.append(Match(element, before, moved.total([group]), gain))
                problem = moved
                continue
        matches.append(Match(None, before, before))
    return matches


def _match_neurons(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Certify the identity by distances if possible, else solve the assignment."""
    distances = {g.name: assignment.row_distances(problem.pairs(g)) for g in groups}
    sums = torch.stack([own.sum() for own in distances.values()]).tolist()
    alone = [
        g
        for g in groups
        if problem.activations is None or g.name not in problem.activations.matrices
    ]
    bounds = [partial(problem.anchor.separation, group) for group in alone]
    known = assignment.identities_certified([distances[g.name] for g in alone], bounds)
    certified = {group.name for group, ok in zip(alone, known, strict=True) if ok}
    matches = []
    for group, distance in zip(groups, sums, strict=True):
        before = problem.finite(distance, group)
        if group.name in certified:
            matches.append(Match(None, before, before, certified=distances[group.name]))
            continue
        blocks = problem.pairs(group)
        evidence = problem.evidence(group, blocks)
        scores = _scores(group, blocks, evidence)
        if evidence[1] is None:
            element, gain = assignment.assignment(*scores)
            after = max(before - gain, 0.0)
        else:
            element, gain = assignment.best_assignment(*scores)
            after = before
            if element is not None:
                moved = problem.moved([Move(group, element)])
                after = moved.distance(group, moved.pairs(group))
        matches.append(Match(element, before, after, gain))
    return matches


def _scores(
    group: Group, blocks: Sequence[Pair], evidence: tuple[float, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Return the similarities ``[n, n]`` of slots that keep their signs, and of slots
    that may not.
    """
    factor, addition = evidence
    plain, signed = (
        factor * _product(side) if factor else torch.zeros(())
        for side in by_sign(group, blocks)
    )
    if not isinstance(group.action, SignedPermutation):
        return plain if addition is None else plain + addition, None
    return plain, signed if addition is None else signed + addition


def _product(blocks: Sequence[Pair]) -> Tensor:
    """Return ``sum of A C^T`` over the blocks, ``[n, n]``; a scalar 0 if there are
    none.
    """
    total: Tensor | None = None
    for a, c in blocks:
        total = a @ c.mT if total is None else torch.addmm(total, a, c.mT)
    return torch.zeros(()) if total is None else total
