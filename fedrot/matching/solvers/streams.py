"""Solver for rotations of the residual stream: orthogonal Procrustes over everything on the stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from fedrot.matching.assignment import MINIMUM_GAIN
from fedrot.matching.pairs import Pair
from fedrot.matching.problem import Match, Problem
from fedrot.matching.procrustes import polar
from fedrot.matching.stages import solves
from fedrot.symmetry.groups import Group
from fedrot.symmetry.stream import StreamRotation


@solves(StreamRotation)
def match_stream(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Return for each stream ``argmax <Q, sum of A C^T>``, with the activations' term if given."""
    matches = []
    for group in groups:
        kind = cast(StreamRotation, group.kind)
        blocks = problem.pairs(group)
        before = problem.distance(group, blocks)
        factor, addition = problem.evidence(group, blocks)
        weights = _cross(blocks)
        cross = factor * weights if addition is None else factor * weights + addition
        if kind.centred:
            cross = _keeping_ones(cross)
        precise = blocks[0][1].dtype == torch.float64
        element = polar(cross[None], problem.options.ridge, precise=precise)
        gain, removed = (2 * float((element * m).sum() - m.trace()) for m in (cross, weights))
        if gain > MINIMUM_GAIN * abs(float(cross.trace())):
            matches.append(Match(element, before, max(before - removed, 0.0), gain))
        else:
            matches.append(Match(None, before, before))
    return matches


def _cross(blocks: Sequence[Pair]) -> Tensor:
    """Return ``sum of A C^T`` over the blocks, float64 ``[dim, dim]``."""
    total = torch.zeros((), dtype=torch.float64)
    for a, c in blocks:
        total = total + (a @ c.mT).double()
    return total


def _keeping_ones(cross: Tensor) -> Tensor:
    """Return a matrix whose best rotation keeps the vector of ones, and is the best of those."""
    centred = cross - cross.mean(0)
    centred = centred - centred.mean(1, keepdim=True)
    return centred + torch.linalg.matrix_norm(centred) / len(cross)
