"""Solver for rotations of the residual stream: orthogonal Procrustes over all tensors
on the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fedrot.matching.assignment import MINIMUM_GAIN
from fedrot.matching.problem import Match, Problem, blocks_of, solves
from fedrot.matching.procrustes import polar
from fedrot.symmetry.groups import Group
from fedrot.symmetry.stream import StreamRotation


@solves(StreamRotation)
def match_stream(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Return for each stream ``argmax <Q, sum of A C^T>``, with the activations' term
    if given.
    """
    matches = []
    for group in groups:
        action = cast(StreamRotation, group.action)
        before, weights, precise = _looked_through(group, problem)
        factor, addition = problem.evidence(group)
        cross = factor * weights if addition is None else factor * weights + addition
        if action.centred:
            # The best rotation of this matrix is the best of those that keep the vector
            # of ones.
            centred = cross - cross.mean(0)
            centred = centred - centred.mean(1, keepdim=True)
            cross = centred + torch.linalg.matrix_norm(centred) / len(cross)
        element = polar(cross[None], precise=precise)
        gain, removed = (
            2 * float((element * m).sum() - m.trace()) for m in (cross, weights)
        )
        if gain > MINIMUM_GAIN * abs(float(cross.trace())):
            matches.append(Match(element, before, max(before - removed, 0.0), gain))
        else:
            matches.append(Match(None, before, before))
    return matches


def _looked_through(group: Group, problem: Problem) -> tuple[float, Tensor, bool]:
    """Return the squared distance, ``sum of A C^T`` ``[dim, dim]``, and whether all
    tensors are float64.

    Tensors are read in blocks, because two large models may not fit into memory in
    float32.
    """
    distance, cross, precise = 0.0, torch.zeros((), dtype=torch.float64), True
    for slot in group.slots:
        for a, c in blocks_of(slot, problem.anchor.tensors, problem.client):
            distance += problem.distance(group, [(a, c)])
            cross = cross + (a @ c.mT).double()
            precise = precise and c.dtype == torch.float64
    return distance, cross, precise
