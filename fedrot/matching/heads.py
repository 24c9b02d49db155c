"""Solvers for the order of attention heads and of query heads that share a key head.

Source: Verma & Elbayad 2024, Alg. 1. The score of a pair of heads is ``<R, M>`` for the
best element ``R`` inside this pair: heads are compared after the best rotation. If
query heads share a key head, this element is computed from keys and values; then the
query heads of the two key heads are assigned to each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedrot.errors import SymmetryError
from fedrot.matching.assignment import (
    MINIMUM_GAIN,
    best_assignment,
    best_columns,
    joined,
    summed,
)
from fedrot.matching.inside_heads import HeadSolver
from fedrot.matching.pairs import Pairs, moved_pairs
from fedrot.matching.problem import Match, Problem, each, match_by, solver_of, solves
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
        keys: pairs of slots with ``heads * dim`` rows, which belong to key heads.
        queries: pairs of slots with more rows, of query heads that share key heads.
        factor: of the similarity of ``keys``. With 0, ``queries`` are used only for the
            order of query heads.
        extra: cross matrix ``[heads * dim, heads * dim]`` of activations, added to the
            similarity.
    """

    action: InsideHeads
    solver: HeadSolver
    keys: Pairs
    queries: Pairs = ()
    factor: float = 1.0
    extra: Tensor | None = None

    def ordered(
        self,
        order: HeadPermutation | QueryPermutation,
        element: Tensor,
    ) -> Inside:
        """Return the evidence after an order has moved heads of the client."""
        queries = moved_pairs(order, element, self.queries)
        if isinstance(order, QueryPermutation):
            return replace(self, queries=queries)
        keys = moved_pairs(order, element, self.keys)
        extra = self.extra
        if extra is not None:
            extra = order.act(element, extra, 1)
        return replace(self, keys=keys, queries=queries, extra=extra)

    def worth(self, options: AlignmentOptions) -> float:
        """Return the sum of ``<R, M>`` over all heads in their places.

        ``R`` are the best elements.
        """
        evidence = self.in_place()
        if self.queries:
            evidence = evidence + self.solver.similarity(self.action, self.queries)
        return float(self.solver.worth(self.action, evidence, options).sum())

    def best(
        self,
        evidence: Tensor,
        options: AlignmentOptions,
    ) -> Tensor:
        """Return the best elements for evidence that was computed from the pairs."""
        precise = self.keys[0][1].dtype == torch.float64
        return self.solver.best(self.action, evidence, options, precise)

    def every_pair(self) -> Tensor:
        """Return the evidence of every pair of key heads.

        The shape is ``[heads (anchor), heads (client), ...]``.
        """
        heads = self.action.heads
        products = _products(self.keys, heads)
        cross = summed(self.factor * product for product in products)
        if self.extra is not None:
            cross = cross + _by_head(self.extra, heads)
        return self.solver.of_cross(self.action, cross)

    def in_place(self) -> Tensor:
        """Return the evidence of key heads in their places, ``[heads, ...]``."""
        evidence = self.factor * self.solver.similarity(self.action, self.keys)
        if self.extra is not None:
            cross = diagonal_blocks(self.extra, self.action.dim)
            evidence = evidence + self.solver.of_cross(self.action, cross)
        return evidence

    def of_queries(
        self,
        element: Tensor,
        i: int,
        j: int,
    ) -> Tensor:
        """Return ``<a_h, R c_k>`` of the query heads of two groups.

        They are group ``i`` of the anchor and group ``j`` of the client. Only weights
        are used: activations are known for key heads, not for query heads.
        """
        by_group = (self.action.heads, -1)
        of_one_group = replace(self.action, heads=1)
        scores = []
        for a, c in self.queries:
            anchors = a.unflatten(0, by_group)[i]
            clients = c.unflatten(0, by_group)[j]
            moved = of_one_group.act(element[None], clients, 0)
            by_head = (len(anchors) // self.action.dim, -1)
            score = anchors.reshape(by_head) @ moved.reshape(by_head).mT
            scores.append(score.double())
        return summed(scores)


@solves(HeadPermutation)
@each
def match_heads(
    group: Group,
    problem: Problem,
) -> Match:
    """Assign heads by their similarity after the best elements inside them."""
    blocks = problem.pairs(group)
    before = problem.distance(group, blocks)
    following = _following(group.name, problem)
    inside = [_inside(member, problem) for member in following]
    moved = {(slot.tensor, slot.axis) for g in following for slot in g.slots}
    alone = [
        pair
        for slot, pair in zip(group.slots, blocks, strict=True)
        if (slot.tensor, slot.axis) not in moved
    ]
    action = cast(HeadPermutation, group.action)
    element, gain = best_assignment(
        head_scores(inside, alone, action.n, problem.options)
    )
    for shared in problem.symmetry.groups:
        order = shared.action
        if shared.within != group.name or not isinstance(order, QueryPermutation):
            continue
        # Scores from weights are lower bounds: the true gain of the order is
        # computed.
        if element is not None and any(g.factor for g in inside):
            ordered = [g.ordered(action, element) for g in inside]
            _, gain = _gain(inside, ordered, order, problem.options)
            if gain <= 0:
                element = None
    return match_by(group, blocks, before, element, gain)


@solves(QueryPermutation)
@each
def match_queries(
    group: Group,
    problem: Problem,
) -> Match:
    """Assign the query heads that share a key head, for each key head separately."""
    blocks = problem.pairs(group)
    before = problem.distance(group, blocks)
    action = cast(QueryPermutation, group.action)
    following = _following(group.within, problem)
    if following:
        inside = [_inside(member, problem) for member in following]
        order, gain = _gain(inside, inside, action, problem.options)
    else:
        order, gain = _alike(action, blocks)
    return match_by(group, blocks, before, order if gain > 0 else None, gain)


def _following(
    heads: str,
    problem: Problem,
) -> list[Group]:
    """Return the groups inside the heads of a group that are matched after it."""
    if "attention" not in problem.options.parts:
        return []
    attention = (g for g in problem.symmetry.groups if g.part == "attention")
    return [group for group in attention if group.within == heads]


def _inside(
    group: Group,
    problem: Problem,
) -> Inside:
    solver: object = solver_of(group)
    if not isinstance(solver, HeadSolver):
        raise SymmetryError(
            f"Heads cannot be ordered: the solver of the group '{group.name}' inside "
            f"them is not a HeadSolver. Register one for {type(group.action).__name__} "
            "(fedrot.matching.inside_heads)."
        )
    action = cast(InsideHeads, group.action)
    blocks = problem.pairs(group)
    rows = action.heads * action.dim
    keys = [pair for pair in blocks if len(pair[0]) == rows]
    queries = [pair for pair in blocks if len(pair[0]) > rows]
    factor, extra = problem.evidence(group, blocks)
    return Inside(
        action,
        solver,
        keys,
        queries,
        factor,
        extra,
    )


def _gain(
    before: Sequence[Inside],
    after: Sequence[Inside],
    order: QueryPermutation,
    options: AlignmentOptions,
) -> tuple[Tensor, float]:
    """Return the best order of queries after heads have moved, and the joint gain.

    The gain of both orders is the decrease of the squared distance; 0 if within
    rounding.
    """
    elements = [(g, g.best(g.in_place(), options)) for g in after]
    scores = []
    for i in range(order.groups):
        terms = (g.of_queries(best[i], i, i) for g, best in elements)
        scores.append(summed(terms))
    queries, _ = _assigned(torch.stack(scores))
    worth = sum(g.ordered(order, queries).worth(options) for g in after)
    still = sum(g.worth(options) for g in before)
    gain = 2 * (worth - still)
    return queries, gain if gain > MINIMUM_GAIN * abs(still) else 0.0


def _alike(
    action: QueryPermutation,
    blocks: Pairs,
) -> tuple[Tensor, float]:
    """Assign queries by the inner products of their blocks.

    No group inside the heads is matched.
    """
    shape = (action.groups, action.n, -1)
    scores = summed(
        a.double().reshape(shape) @ c.double().reshape(shape).mT for a, c in blocks
    )
    return _assigned(scores)


def head_scores(
    inside: Sequence[Inside],
    alone: Pairs,
    heads: int,
    options: AlignmentOptions,
) -> Tensor:
    """Return the score of every pair of key heads, float64.

    The shape is ``[heads (anchor), heads (client)]``. ``inside`` are the groups inside
    the heads that are matched afterwards, ``alone`` the pairs that none of these groups
    moves.
    """
    products = _products(alone, heads)
    scores = summed(torch.diagonal(p, dim1=-2, dim2=-1).sum(-1) for p in products)
    elements = {}
    for group in inside:
        evidence = group.every_pair()
        if group.queries and group.factor:
            elements[group] = group.best(evidence, options)
            worth = group.solver.value(group.action, elements[group], evidence)
        else:
            worth = group.solver.worth(group.action, evidence, options)
        scores = scores + worth
    if elements:
        every = []
        for i in range(heads):
            for j in range(heads):
                terms = (g.of_queries(best[i, j], i, j) for g, best in elements.items())
                every.append(summed(terms))
        # Assignments are solved on the CPU: one copy for all pairs.
        of_pairs = torch.stack(every).cpu()
        rows = torch.arange(len(every[0]))
        sums = [score[rows, best_columns(score)].sum() for score in of_pairs]
        worth = torch.stack(sums).reshape(heads, heads)
        scores = scores + worth.to(scores.device)
    return scores


def _assigned(scores: Tensor) -> tuple[Tensor, float]:
    """Return the best order for each of the scores, and the sum of their gains.

    ``scores`` are ``[groups, n, n]``.
    """
    orders = [best_assignment(score) for score in scores.cpu()]
    element, gain = joined(orders, torch.arange(scores.shape[-1]))
    return element.to(scores.device), gain


def _products(
    blocks: Pairs,
    heads: int,
) -> Iterator[Tensor]:
    """Yield ``A C^T`` of each pair by heads, float64 ``[heads, heads, d, d]``."""
    for a, c in blocks:
        yield _by_head((a @ c.mT).double(), heads)


def _by_head(
    matrix: Tensor,
    heads: int,
) -> Tensor:
    """Return ``[heads, heads, d, d]`` of a matrix ``[heads * d, heads * d]``."""
    size = (heads, -1)
    return matrix.unflatten(1, size).unflatten(0, size).transpose(1, 2)
