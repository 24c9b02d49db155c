"""Solvers inside heads: ``HeadSolver``, and closed forms for rotations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import reduce
from itertools import compress
from sys import float_info
from typing import Any

import torch
from torch import Tensor

from fedrot.matching.chance import beyond, lower_threshold
from fedrot.matching.pairs import Pairs, squared_distance
from fedrot.matching.problem import Groups, Match, Problem, in_batches, solves
from fedrot.matching.procrustes import best_orders, polar, singular_values
from fedrot.options import AlignmentOptions
from fedrot.symmetry.actions import HeadRotation
from fedrot.tensors import diagonal_blocks, identity

#: An element must gain more than this share of ``|<I, M>|``; smaller gains are rounding
#: errors.
MINIMUM_GAIN = 1e-12


class HeadSolver(ABC):
    """A solver for groups inside heads: all heads of all layers in one batch.

    The evidence ``M`` of a pair of heads determines the best element. ``<R, M>`` is the
    similarity of the heads after the element ``R`` has moved the client's head. Leading
    axes (layers, pairs of heads) are batches.
    """

    @abstractmethod
    def similarity(
        self,
        action: Any,
        blocks: Pairs,
    ) -> Tensor:
        """Return the evidence from blocks of weights, ``[heads, ...]``."""

    @abstractmethod
    def of_cross(
        self,
        action: Any,
        cross: Tensor,
    ) -> Tensor:
        """Return the evidence from cross matrices ``A C^T``, ``[..., dim, dim]``."""

    @abstractmethod
    def best(
        self,
        action: Any,
        evidence: Tensor,
        options: AlignmentOptions,
        precise: bool = True,
    ) -> Tensor:
        """Return the elements with the largest ``<R, M>``.

        ``precise`` means float64 weights.
        """

    @abstractmethod
    def value(
        self,
        action: Any,
        element: Tensor,
        evidence: Tensor,
    ) -> Tensor:
        """Return ``<R, M>`` of elements, ``[...]``."""

    @abstractmethod
    def still(
        self,
        action: Any,
        evidence: Tensor,
    ) -> Tensor:
        """Return ``<I, M>`` of the identity, ``[...]``."""

    def worth(
        self,
        action: Any,
        evidence: Tensor,
        options: AlignmentOptions,
    ) -> Tensor:
        """Return ``<R, M>`` of the best elements, ``[...]``."""
        return self.value(action, self.best(action, evidence, options), evidence)

    def __call__(
        self,
        groups: Groups,
        problem: Problem,
    ) -> list[Match]:
        """Return the matches of all groups; equal actions form one batch."""
        return in_batches(
            groups,
            lambda group: group.action,
            lambda members: self._batch(members, problem),
        )

    def ceiling(
        self,
        action: Any,
        evidence: Tensor,
    ) -> Tensor | None:
        """Return upper bounds of ``<R, M> - <I, M>``, ``[...]``.

        None if ``best`` costs no more.
        """
        return None

    def _batch(
        self,
        groups: Groups,
        problem: Problem,
    ) -> list[Match]:
        action = groups[0].action
        crosses = []
        weights = []
        distances = []
        for group in groups:
            blocks = problem.pairs(group)
            distances.append(squared_distance(blocks))
            factor, addition = problem.evidence(group, blocks)
            weight = self.similarity(action, blocks)
            cross = factor * weight
            if addition is not None:
                in_place = diagonal_blocks(addition, len(addition) // action.units)
                cross = cross + self.of_cross(action, in_place)
            weights.append(weight)
            crosses.append(cross)
        # One transfer from the device for all groups.
        before = torch.stack(distances).tolist()
        required = [
            lower_threshold(problem, group, problem.finite(distance, group))
            for group, distance in zip(groups, before, strict=True)
        ]
        cross = torch.stack(crosses)
        most = [torch.inf] * len(groups)
        ceiling = self.ceiling(action, cross) if any(required) else None
        if ceiling is not None:
            most = (2 * ceiling.sum(1)).tolist()
        for i, needed in enumerate(required):
            # Groups that cannot be compared gain nothing.
            if needed == torch.inf:
                most[i] = 0.0
        matches = [
            Match(None, distance, distance, gain)
            for distance, gain in zip(before, most, strict=True)
        ]
        # If chance is drawn later, a group may still be evidence for the others.
        needs = [max(needed, float_info.min) for needed in required]
        left = list(compress(range(len(groups)), beyond(most, needs)))
        if not left:
            return matches
        cross = cross[left]
        precise = blocks[0][1].dtype == torch.float64
        elements = self.best(action, cross, problem.options, precise)
        gains = self._gains(action, elements, cross)
        removed = self._gains(action, elements, torch.stack(weights)[left])
        traces = self.still(action, cross).sum(1).abs().tolist()
        rows = zip(left, elements, gains, removed, traces, strict=True)
        for i, element, gain, decrease, trace in rows:
            distance = before[i]
            matches[i] = Match(None, distance, distance)
            if gain > MINIMUM_GAIN * trace:
                matches[i] = Match(
                    element, distance, max(distance - decrease, 0.0), gain
                )
        return matches

    def _gains(
        self,
        action: Any,
        elements: Tensor,
        evidence: Tensor,
    ) -> list[float]:
        """Return by how much elements of groups lower the squared distance."""
        gains = self.value(action, elements, evidence) - self.still(action, evidence)
        return (2 * gains).sum(1).tolist()


#: Factor on the ceiling that covers its rounding errors in float32.
ROUNDED = 1.01


class RotationSolver(HeadSolver):
    """Rotations: the evidence is ``M = sum over slots of A C^T``.

    It is float64 ``[heads, dim, dim]``.
    """

    def similarity(
        self,
        action: HeadRotation,
        blocks: Pairs,
    ) -> Tensor:
        products = (
            torch.bmm(_by_key_head(action, a), _by_key_head(action, c).mT)
            for a, c in blocks
        )
        total = reduce(Tensor.add_, products)
        # Directions of M below its rounding error do not determine the rotation and
        # stay as they are.
        m = total.double()
        noise = torch.finfo(total.dtype).eps * torch.linalg.matrix_norm(m)
        return m + noise[:, None, None] * identity(m)

    def of_cross(
        self,
        action: HeadRotation,
        cross: Tensor,
    ) -> Tensor:
        return cross

    def ceiling(
        self,
        action: HeadRotation,
        evidence: Tensor,
    ) -> Tensor:
        """Return ``|H^-1/2 K|^2 / 2``, where ``M = H + K``.

        ``H`` is symmetric, ``K`` skew. For every ``P > 0``, ``|M|_* <= tr(P + M^T P^-1
        M) / 2``; here ``P = H``. The bound is infinite if ``H`` is not positive
        definite.
        """
        if evidence.ndim > 3 and evidence.device.type == "cpu":
            # The matrices of one group stay in the cache.
            return torch.stack([self.ceiling(action, group) for group in evidence])
        single = evidence.float()
        symmetric = (single + single.mT) / 2
        skew = (single - single.mT) / 2
        factor, failed = torch.linalg.cholesky_ex(symmetric)
        half = torch.linalg.solve_triangular(factor, skew, upper=False)
        squares = half.square().sum((-1, -2))
        bound = ROUNDED * squares.double() / 2
        return torch.where(failed > 0, torch.inf, bound)

    def best(
        self,
        action: HeadRotation,
        evidence: Tensor,
        options: AlignmentOptions,
        precise: bool = True,
    ) -> Tensor:
        if options.within_heads == "permutation":
            return best_orders(evidence)
        return polar(evidence, precise=precise)

    def value(
        self,
        action: HeadRotation,
        element: Tensor,
        evidence: Tensor,
    ) -> Tensor:
        return (element * evidence).sum((-1, -2))

    def still(
        self,
        action: HeadRotation,
        evidence: Tensor,
    ) -> Tensor:
        return torch.diagonal(evidence, dim1=-2, dim2=-1).sum(-1)

    def worth(
        self,
        action: HeadRotation,
        evidence: Tensor,
        options: AlignmentOptions,
    ) -> Tensor:
        if options.within_heads == "rotation":
            return singular_values(evidence).sum(-1)
        return super().worth(action, evidence, options)


def _by_key_head(
    action: HeadRotation,
    rows: Tensor,
) -> Tensor:
    """Return ``[heads, dim, rest]``; query heads that share a key head are joined in
    ``rest``.
    """
    if len(rows) == action.heads * action.dim:
        return rows.unflatten(0, (action.heads, action.dim))
    heads = rows.unflatten(0, (action.heads, -1, action.dim))
    return heads.transpose(1, 2).flatten(2)


solves(HeadRotation)(RotationSolver())
