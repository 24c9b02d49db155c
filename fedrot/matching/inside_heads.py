"""``HeadSolver``: the base of the closed forms that find one element per attention head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedrot.matching.pairs import Pair
from fedrot.matching.problem import Match, Problem
from fedrot.options import AlignmentOptions
from fedrot.symmetry.groups import Group
from fedrot.tensors import diagonal_blocks

#: An element must gain more than this share of ``|<I, M>|``; smaller gains are rounding.
MINIMUM_GAIN = 1e-12


class HeadSolver(ABC):
    """A solver for groups inside heads: all heads of all layers in one batch.

    The methods work on the evidence ``M`` for each head: everything about two heads that the best
    element depends on. ``<R, M>`` is the similarity once the element ``R`` has moved the client's head.
    Leading axes (layers, pairs of heads) are batches.
    """

    @abstractmethod
    def similarity(self, action: Any, blocks: Sequence[Pair]) -> Tensor:
        """Return the evidence from blocks of weights, ``[heads, ...]``."""

    @abstractmethod
    def of_cross(self, action: Any, cross: Tensor) -> Tensor:
        """Return the evidence from cross matrices ``A C^T``, ``[..., dim, dim]``."""

    @abstractmethod
    def best(
        self, action: Any, evidence: Tensor, options: AlignmentOptions, precise: bool = True
    ) -> Tensor:
        """Return the elements with the largest ``<R, M>``; ``precise`` if weights are float64."""

    @abstractmethod
    def value(self, action: Any, element: Tensor, evidence: Tensor) -> Tensor:
        """Return ``<R, M>`` of elements, ``[...]``."""

    @abstractmethod
    def still(self, action: Any, evidence: Tensor) -> Tensor:
        """Return ``<I, M>`` of the identity, ``[...]``."""

    def worth(self, action: Any, evidence: Tensor, options: AlignmentOptions) -> Tensor:
        """Return ``<R, M>`` of the best elements, ``[...]``."""
        return self.value(action, self.best(action, evidence, options), evidence)

    def __call__(self, groups: Sequence[Group], problem: Problem) -> list[Match]:
        """Return the matches of all groups, those with equal actions in one batch."""
        batches: dict[object, list[Group]] = defaultdict(list)
        for group in groups:
            batches[group.kind].append(group)
        matches: dict[str, Match] = {}
        for batch in batches.values():
            found = self._batch(batch, problem)
            matches |= {group.name: match for group, match in zip(batch, found, strict=True)}
        return [matches[group.name] for group in groups]

    def _batch(self, groups: Sequence[Group], problem: Problem) -> list[Match]:
        action = groups[0].kind
        crosses, weights, before = [], [], []
        for group in groups:
            blocks = problem.pairs(group)
            before.append(problem.distance(group, blocks))
            factor, addition = problem.evidence(group, blocks)
            weights.append(self.similarity(action, blocks))
            crosses.append(factor * weights[-1])
            if addition is not None:
                own = diagonal_blocks(addition, len(addition) // action.units)
                crosses[-1] = crosses[-1] + self.of_cross(action, own)
        cross, weight = torch.stack(crosses), torch.stack(weights)
        best = self.best(action, cross, problem.options, blocks[0][1].dtype == torch.float64)
        gains, removed = (
            (2 * (self.value(action, best, m) - self.still(action, m)).sum(1)).tolist()
            for m in (cross, weight)
        )
        traces = self.still(action, cross).sum(1).abs().tolist()
        return [
            Match(None, before[i], before[i])
            if gains[i] <= MINIMUM_GAIN * traces[i]
            else Match(best[i], before[i], max(before[i] - removed[i], 0.0), gains[i])
            for i in range(len(groups))
        ]
