"""Solvers for the order of attention heads (Verma & Elbayad 2024, Alg. 1), and of
shared query heads.

The score of a pair of heads is ``<R, M>`` for the best element ``R`` inside this pair:
heads are compared after the best rotation. If query heads share a key head, this
element is found from keys and values; then the query heads of the two key heads are
assigned to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedrot.errors import SymmetryError
from fedrot.matching.assignment import MINIMUM_GAIN, best_assignment, best_columns
from fedrot.matching.inside_heads import HeadSolver
from fedrot.matching.problem import (
    Match,
    Pair,
    Problem,
    solver_of,
    solves,
    squared_distance,
)
from fedrot.options import AlignmentOptions
from fedrot.symmetry.actions import HeadPermutation, InsideHeads, QueryPermutation
from fedrot.symmetry.groups import Group
from fedrot.tensors import diagonal_blocks


@dataclass(frozen=True, eq=False)
class Inside:
    """The evidence about one group inside heads, from which heads are ordered.

    Attributes:
        action: the group's action.
        solver: of the group.
        blocks: one pair per slot. A block of ``heads * dim`` rows belongs to key heads;
            a longer block to query heads that share key heads.
        factor: of the similarity of key heads' blocks. With 0, query heads' blocks are
            used only for the order of query heads.
        extra: cross matrix ``[heads * dim, heads * dim]`` of activations, added to the
            similarity.
    """

    action: InsideHeads
    solver: HeadSolver
    blocks: Sequence[Pair]
    factor: float = 1.0
    extra: Tensor | None = None

    def own(self) -> Sequence[Pair]:
        """Return the blocks of key heads."""
        return [
            pair
            for pair in self.blocks
            if len(pair[0]) == self.action.heads * self.action.dim
        ]

    def shared(self) -> Sequence[Pair]:
        """Return the blocks of query heads that share key heads."""
        return [
            pair
            for pair in self.blocks
            if len(pair[0]) > self.action.heads * self.action.dim
        ]

    def ordered(
        self, order: HeadPermutation | QueryPermutation, element: Tensor
    ) -> Inside:
        """Return the evidence after an order has moved heads of the client."""
        if isinstance(order, QueryPermutation):
            blocks = [(a, order.act(element, c, 0)) for a, c in self.shared()]
            return replace(self, blocks=[*self.own(), *blocks])
        blocks = [(a, order.act(element, c, 0)) for a, c in self.blocks]
        extra = None if self.extra is None else order.act(element, self.extra, 1)
        return replace(self, blocks=blocks, extra=extra)

    def worth(self, options: AlignmentOptions) -> float:
        """Return the sum of ``<R, M>`` for the best elements ``R`` over all heads in
        their places.
        """
        evidence = self.factor * self.solver.similarity(self.action, self.own())
        if self.shared():
            evidence = evidence + self.solver.similarity(self.action, self.shared())
        if self.extra is not None:
            own = diagonal_blocks(self.extra, self.action.dim)
            evidence = evidence + self.solver.of_cross(self.action, own)
        return float(self.solver.worth(self.action, evidence, options).sum())

    def best(self, evidence: Tensor, options: AlignmentOptions) -> Tensor:
        """Return the best elements for evidence that was computed from the blocks."""
        precise = self.blocks[0][1].dtype == torch.float64
        return self.solver.best(self.action, evidence, options, precise)

    def every_pair(self) -> Tensor:
        """Return the evidence of every pair of key heads, ``[heads (anchor), heads
        (client), ...]``.
        """
        heads = self.action.heads
        cross = _summed(
            self.factor * _by_head((a @ c.mT).double(), heads) for a, c in self.own()
        )
        if self.extra is not None:
            cross = cross + _by_head(self.extra, heads)
        return self.solver.of_cross(self.action, cross)

    def own_pair(self) -> Tensor:
        """Return the evidence of key heads in their places, ``[heads, ...]``."""
        shape = (self.action.heads, self.action.dim)
        sides = ((a.unflatten(0, shape), c.unflatten(0, shape)) for a, c in self.own())
        cross = _summed(self.factor * torch.bmm(a, c.mT).double() for a, c in sides)
        if self.extra is not None:
            cross = cross + diagonal_blocks(self.extra, self.action.dim)
        return self.solver.of_cross(self.action, cross)

    def of_queries(self, element: Tensor, i: int, j: int) -> Tensor:
        """Return ``<a_h, R c_k>`` for the query heads of anchor group ``i`` and client
        group ``j``.

        Only weights are used: activations are known for key heads, not for query heads.
        """
        one = replace(self.action, heads=1)
        scores = []
        for a, c in self.shared():
            ours = a.unflatten(0, (self.action.heads, -1))[i]
            theirs = one.act(
                element[None], c.unflatten(0, (self.action.heads, -1))[j], 0
            )
            n = len(ours) // self.action.dim
            scores.append((ours.reshape(n, -1) @ theirs.reshape(n, -1).mT).double())
        return _summed(scores)


@solves(HeadPermutation)
def match_heads(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Assign heads by their similarity after the best elements inside them."""
    matches = []
    for group in groups:
        following = _following(group.name, problem)
        moved = {(slot.tensor, slot.axis) for g in following for slot in g.slots}
        blocks = problem.pairs(group)
        before = after = problem.distance(group, blocks)
        heads = cast(HeadPermutation, group.action).n
        inside = [_inside(g, problem) for g in following]
        alone = [
            pair
            for slot, pair in zip(group.slots, blocks, strict=True)
            if (slot.tensor, slot.axis) not in moved
        ]
        element, gain = best_assignment(
            head_scores(inside, alone, heads, problem.options)
        )
        queries = [g.action for g in problem.symmetry.groups if g.within == group.name]
        for order in (
            action for action in queries if isinstance(action, QueryPermutation)
        ):
            if element is not None and any(g.factor for g in inside):
                # Scores from weights are lower bounds: the true gain of the order is
                # computed.
                ordered = [g.ordered(HeadPermutation(heads), element) for g in inside]
                _, gain = _gain(inside, ordered, order, problem)
                element = element if gain > 0 else None
        if element is not None:
            after = float(
                squared_distance(
                    [(a, group.action.act(element, c, 0)) for a, c in blocks]
                )
            )
        matches.append(Match(element, before, after, gain))
    return matches


@solves(QueryPermutation)
def match_queries(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Assign the query heads that share a key head, for each key head separately."""
    matches = []
    for group in groups:
        following = _following(group.within, problem)
        blocks = problem.pairs(group)
        before = after = problem.distance(group, blocks)
        action = cast(QueryPermutation, group.action)
        if following:
            inside = [_inside(g, problem) for g in following]
            element, gain = _gain(inside, inside, action, problem)
        else:
            element, gain = _alike(action, blocks)
        if gain > 0:
            after = float(
                squared_distance([(a, action.act(element, c, 0)) for a, c in blocks])
            )
        matches.append(Match(element if gain > 0 else None, before, after, gain))
    return matches


def _following(heads: str, problem: Problem) -> list[Group]:
    """Return the groups inside the heads of the group ``heads`` that will be matched
    after it.
    """
    asked = "attention" in problem.options.parts
    return [
        g
        for g in problem.symmetry.groups
        if asked and g.part == "attention" and g.within == heads
    ]


def _inside(group: Group, problem: Problem) -> Inside:
    solver: object = solver_of(group)
    if not isinstance(solver, HeadSolver):
        raise SymmetryError(
            f"Heads cannot be ordered: the solver of the group '{group.name}' inside "
            f"them is not a HeadSolver. Register one for {type(group.action).__name__} "
            "(fedrot.matching.inside_heads)."
        )
    blocks = problem.pairs(group)
    return Inside(
        cast(InsideHeads, group.action),
        solver,
        blocks,
        *problem.evidence(group, blocks),
    )


def _gain(
    before: Sequence[Inside],
    after: Sequence[Inside],
    order: QueryPermutation,
    problem: Problem,
) -> tuple[Tensor, float]:
    """Return the best order of queries after heads have moved, and the gain of both
    orders.

    The gain is the decrease of the squared distance; 0 if within rounding.
    """
    elements = [(g, g.best(g.own_pair(), problem.options)) for g in after]
    scores = [
        _summed(g.of_queries(e[i], i, i) for g, e in elements)
        for i in range(order.groups)
    ]
    queries, _ = _assigned(torch.stack(scores))
    worth = sum(g.ordered(order, queries).worth(problem.options) for g in after)
    still = sum(g.worth(problem.options) for g in before)
    gain = 2 * (worth - still)
    return queries, gain if gain > MINIMUM_GAIN * abs(still) else 0.0


def _alike(action: QueryPermutation, blocks: Sequence[Pair]) -> tuple[Tensor, float]:
    """Assign queries by the inner products of their blocks; no group inside the heads
    is matched.
    """
    shape = (action.groups, action.n, -1)
    sides = ((a.double().reshape(shape), c.double().reshape(shape)) for a, c in blocks)
    return _assigned(_summed(a @ c.mT for a, c in sides))


def head_scores(
    inside: Sequence[Inside],
    alone: Sequence[Pair],
    heads: int,
    options: AlignmentOptions,
) -> Tensor:
    """Return the score of every pair of key heads, float64 ``[heads (anchor), heads
    (client)]``.

    ``inside`` are the groups inside the heads that are matched afterwards, ``alone``
    the blocks that none of these groups moves.
    """
    products = (_by_head((a @ c.mT).double(), heads) for a, c in alone)
    scores = _summed(torch.diagonal(p, dim1=-2, dim2=-1).sum(-1) for p in products)
    elements = {}
    for group in inside:
        evidence = group.every_pair()
        if group.shared() and group.factor:
            elements[group] = group.best(evidence, options)
            worth = group.solver.value(group.action, elements[group], evidence)
        else:
            worth = group.solver.worth(group.action, evidence, options)
        scores = scores + worth
    if elements:
        every = [
            _summed(g.of_queries(e[i, j], i, j) for g, e in elements.items())
            for i in range(heads)
            for j in range(heads)
        ]
        # Assignments are solved on the CPU: one copy for all pairs.
        rows = torch.arange(len(every[0]))
        worth = torch.stack(
            [s[rows, best_columns(s)].sum() for s in torch.stack(every).cpu()]
        )
        scores = scores + worth.reshape(heads, heads).to(scores.device)
    return scores


def _assigned(scores: Tensor) -> tuple[Tensor, float]:
    """Return the best order for each of the scores ``[groups, n, n]``, and the sum of
    their gains.
    """
    found = [best_assignment(score) for score in scores.cpu()]
    still = torch.arange(scores.shape[-1])
    orders = torch.stack(
        [still if element is None else element for element, _ in found]
    )
    return orders.to(scores.device), sum(gain for _, gain in found)


def _summed(scores: Iterable[Tensor]) -> Tensor:
    return sum(scores, start=torch.zeros((), dtype=torch.float64))


def _by_head(matrix: Tensor, heads: int) -> Tensor:
    """Return ``[heads, heads, d, d]`` of a matrix ``[heads * d, heads * d]``."""
    return matrix.unflatten(1, (heads, -1)).unflatten(0, (heads, -1)).transpose(1, 2)
