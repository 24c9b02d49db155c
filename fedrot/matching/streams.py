"""Solver for rotations of the residual stream.

It is orthogonal Procrustes over all tensors on the stream.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fedrot.matching.assignment import MINIMUM_GAIN
from fedrot.matching.pairs import blocks_of
from fedrot.matching.problem import Match, Problem, each, solves
from fedrot.matching.procrustes import polar
from fedrot.symmetry.groups import Group
from fedrot.symmetry.stream import StreamRotation


@solves(StreamRotation)
@each
def match_stream(
    group: Group,
    problem: Problem,
) -> Match:
    """Return ``argmax <Q, sum of A C^T>`` of a stream.

    The activations' term is added if there is one.
    """
    action = cast(StreamRotation, group.action)
    before, weights, precise = _looked_through(group, problem)
    factor, addition = problem.evidence(group)
    cross = factor * weights
    if addition is not None:
        cross = cross + addition
    if action.centred:
        # The best rotation of this matrix is the best of those that keep the vector
        # of ones.
        centred = cross - cross.mean(0)
        centred = centred - centred.mean(1, keepdim=True)
        cross = centred + torch.linalg.matrix_norm(centred) / len(cross)
    element = polar(cross[None], precise=precise)
    gain = _gain(element, cross)
    if gain > MINIMUM_GAIN * abs(float(cross.trace())):
        return Match(element, before, max(before - _gain(element, weights), 0.0), gain)
    return Match(None, before, before)


def _gain(
    element: Tensor,
    cross: Tensor,
) -> float:
    """Return by how much a rotation lowers the squared distance."""
    return 2 * float((element * cross).sum() - cross.trace())


def _looked_through(
    group: Group,
    problem: Problem,
) -> tuple[float, Tensor, bool]:
    """Return the squared distance, ``sum of A C^T`` ``[dim, dim]``, and a precision.

    The last result is whether all tensors are float64. Tensors are read in blocks,
    because two large models may not fit into memory in float32.
    """
    distance = 0.0
    cross = torch.zeros((), dtype=torch.float64)
    precise = True
    for slot in group.slots:
        for a, c in blocks_of(slot, problem.anchor.tensors, problem.client):
            distance += problem.distance(group, [(a, c)])
            cross = cross + (a @ c.mT).double()
            precise = precise and c.dtype == torch.float64
    return distance, cross, precise
