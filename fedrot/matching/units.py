"""Solvers for permutations of units.

Units are neurons, hidden units of task heads, or those of the residual stream.
"""

from __future__ import annotations

from functools import partial
from itertools import compress

import torch
from torch import Tensor

from fedrot.matching.assignment import (
    assignment,
    best_assignment,
    identities_certified,
    row_distances,
)
from fedrot.matching.pairs import Pairs, by_sign
from fedrot.matching.problem import (
    COUPLED,
    Evidence,
    Groups,
    Match,
    Problem,
    solves,
    tensors_of,
)
from fedrot.symmetry.actions import Permutation
from fedrot.symmetry.groups import Group, Move
from fedrot.symmetry.signs import SignedPermutation
from fedrot.tensors import Tensors


@solves(Permutation, SignedPermutation)
def match_units(
    groups: Groups,
    problem: Problem,
) -> list[Match]:
    """Assign units, with signs if the action has signs."""
    if groups[0].part in COUPLED:
        return _match_across_layers(groups, problem)
    return _match_neurons(groups, problem)


def _match_across_layers(
    groups: Groups,
    problem: Problem,
) -> list[Match]:
    """Match one group after another, because groups may share tensors.

    A tensor with two axes in the group depends on the element twice. While one axis is
    matched, the other is held fixed; the element is kept only if the objective falls.
    """
    matches = []
    for group in groups:
        blocks = problem.pairs(group)
        before = problem.finite(problem.total([group]), group)
        scores = _scores(group, blocks, problem.evidence(group, blocks))
        element, gain = best_assignment(*scores)
        if element is not None:
            moved = problem.moved([Move(group, element)])
            if len(tensors_of([group])) < len(group.slots):
                gain = problem.objective([group]) - moved.objective([group])
            if gain > 0:
                matches.append(Match(element, before, moved.total([group]), gain))
                problem = moved
                continue
        matches.append(Match(None, before, before))
    return matches


def _match_neurons(
    groups: Groups,
    problem: Problem,
) -> list[Match]:
    """Certify the identity by distances if possible, else solve the assignment."""
    recorded: Tensors = {}
    if problem.activations is not None:
        recorded = problem.activations.matrices
    distances = {}
    bounds = {}
    for group in groups:
        distances[group.name] = row_distances(problem.pairs(group))
        # Weights cannot certify the identity of units whose activations are used.
        if group.name not in recorded:
            bounds[group.name] = partial(problem.anchor.separation, group)
    # One transfer from the device for all groups.
    sums = torch.stack([squares.sum() for squares in distances.values()]).tolist()
    known = identities_certified(
        [distances[name] for name in bounds], [*bounds.values()]
    )
    certified = set(compress(bounds, known))
    matches = []
    for group, total in zip(groups, sums, strict=True):
        before = problem.finite(total, group)
        if group.name in certified:
            squares = distances[group.name]
            matches.append(Match(None, before, before, certified=squares))
            continue
        blocks = problem.pairs(group)
        evidence = problem.evidence(group, blocks)
        scores = _scores(group, blocks, evidence)
        _, addition = evidence
        if addition is None:
            element, gain = assignment(*scores)
            after = max(before - gain, 0.0)
        else:
            element, gain = best_assignment(*scores)
            after = before
            if element is not None:
                moved = problem.moved([Move(group, element)])
                after = moved.distance(group, moved.pairs(group))
        matches.append(Match(element, before, after, gain))
    return matches


def _scores(
    group: Group,
    blocks: Pairs,
    evidence: Evidence,
) -> tuple[Tensor, Tensor | None]:
    """Return the similarities ``[n, n]`` of slots by sign.

    The first are of slots that keep their signs, the second of slots that may not.
    """
    factor, addition = evidence
    # With the factor 0, the weights have no part in the scores: no product is computed.
    sides = by_sign(group, blocks)
    plain, signed = (factor * _product(side if factor else ()) for side in sides)
    signs = isinstance(group.action, SignedPermutation)
    if addition is not None:
        if signs:
            signed = signed + addition
        else:
            plain = plain + addition
    return plain, signed if signs else None


def _product(blocks: Pairs) -> Tensor:
    """Return ``sum of A C^T`` over the blocks, ``[n, n]``; a scalar 0 without any."""
    total = torch.zeros(())
    for a, c in blocks:
        total = torch.addmm(total, a, c.mT) if total.ndim else a @ c.mT
    return total
