"""Solvers for the order of attention heads (Verma & Elbayad 2024, Alg. 1), and of shared query heads.

The score of a pair of heads is ``<R, M>`` of the best element inside this pair: heads are ordered as if
each had been rotated already. Where query heads share a key head, that element is found from keys and
values; then the query heads of the two groups are assigned to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedrot.errors import SymmetryError
from fedrot.matching.assignment import MINIMUM_GAIN, best_assignment
from fedrot.matching.inside_heads import HeadSolver
from fedrot.matching.pairs import Pair, squared_distance
from fedrot.matching.problem import Match, Problem
from fedrot.matching.stages import Solver, solver_of, solves
from fedrot.options import AlignmentOptions
from fedrot.symmetry.actions import HeadPermutation, HeadRotation, QueryPermutation
from fedrot.symmetry.groups import Group
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from fedrot.tensors import diagonal_blocks


@dataclass(frozen=True, eq=False)
class Inside:
    """The evidence about one group inside heads, from which heads are ordered.

    Attributes:
        kind: the group's action.
        solver: of the group.
        blocks: one pair per slot. A block of ``heads * dim`` rows belongs to key heads; a longer one to
            query heads that share key heads.
        factor: of the similarity of key heads' blocks. With 0, query heads' blocks decide only about
            the order of query heads.
        extra: cross matrix ``[heads * dim, heads * dim]`` of activations, added to the similarity.
    """

    kind: HeadRotation | RotaryPhases | RotarySigns
    solver: HeadSolver
    blocks: Sequence[Pair]
    factor: float = 1.0
    extra: Tensor | None = None

    @property
    def precise(self) -> bool:
        """Whether the blocks are float64."""
        return self.blocks[0][1].dtype == torch.float64

    def own(self) -> Sequence[Pair]:
        """Return the blocks of key heads."""
        return [pair for pair in self.blocks if len(pair[0]) == self.kind.heads * self.kind.dim]

    def shared(self) -> Sequence[Pair]:
        """Return the blocks of query heads that share key heads."""
        return [pair for pair in self.blocks if len(pair[0]) > self.kind.heads * self.kind.dim]

    def ordered(self, order: HeadPermutation | QueryPermutation, element: Tensor) -> Inside:
        """Return the group after heads of the client have been moved."""
        queries, own = isinstance(order, QueryPermutation), self.kind.heads * self.kind.dim
        blocks = [
            (a, c if queries and len(c) == own else order.act(element, c, 0)) for a, c in self.blocks
        ]
        extra = self.extra
        if extra is not None and not queries:
            extra = order.act(element, extra, 1)
        return replace(self, blocks=blocks, extra=extra)

    def worth(self, options: AlignmentOptions) -> float:
        """Return the sum of ``<R, M>`` over all heads in their places, of the best elements."""
        evidence = self.factor * self.solver.similarity(self.kind, self.own())
        if self.shared():
            evidence = evidence + self.solver.similarity(self.kind, self.shared())
        if self.extra is not None:
            own = diagonal_blocks(self.extra, self.kind.dim)
            evidence = evidence + self.solver.of_cross(self.kind, own)
        return float(self.solver.worth(self.kind, evidence, options).sum())

    def every_pair(self) -> Tensor:
        """Return the evidence of every pair of key heads, ``[heads (anchor), heads (client), ...]``."""
        cross = torch.zeros((), dtype=torch.float64)
        for a, c in self.own():
            product = self.factor * _by_head((a @ c.mT).double(), self.kind.heads)
            cross = cross.to(product.device) + product
        if self.extra is not None:
            cross = cross + _by_head(self.extra, self.kind.heads)
        return self.solver.of_cross(self.kind, cross)

    def own_pair(self) -> Tensor:
        """Return the evidence of key heads in their places, ``[heads, ...]``."""
        cross = torch.zeros((), dtype=torch.float64)
        for pair in self.own():
            a, c = (x.unflatten(0, (self.kind.heads, self.kind.dim)) for x in pair)
            product = self.factor * torch.bmm(a, c.mT).double()
            cross = cross.to(product.device) + product
        if self.extra is not None:
            cross = cross + diagonal_blocks(self.extra, self.kind.dim)
        return self.solver.of_cross(self.kind, cross)

    def of_queries(self, element: Tensor, i: int, j: int) -> Tensor:
        """Return ``<a_h, R c_k>`` for the query heads of anchor group ``i`` and client group ``j``.

        Only weights count: activations are known for key heads, not for query heads.
        """
        one = replace(self.kind, heads=1)
        scores = []
        for a, c in self.shared():
            ours = a.unflatten(0, (self.kind.heads, -1))[i]
            theirs = one.act(element[None], c.unflatten(0, (self.kind.heads, -1))[j], 0)
            n = len(ours) // self.kind.dim
            scores.append((ours.reshape(n, -1) @ theirs.reshape(n, -1).mT).double())
        return _summed(scores)


@solves(HeadPermutation)
def match_heads(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Assign heads by the similarity that remains once the elements inside them have moved."""
    matches = []
    for group in groups:
        following = _following(group.name, problem)
        moved = {(slot.tensor, slot.axis) for g in following for slot in g.slots}
        blocks = problem.pairs(group)
        before = after = problem.distance(group, blocks)
        heads = cast(HeadPermutation, group.kind).n
        inside = [_inside(g, problem) for g in following]
        alone = [
            pair
            for slot, pair in zip(group.slots, blocks, strict=True)
            if (slot.tensor, slot.axis) not in moved
        ]
        element, gain = best_assignment(head_scores(inside, alone, heads, problem.options))
        queries = [g.kind for g in problem.symmetry.groups if g.within == group.name]
        for order in (kind for kind in queries if isinstance(kind, QueryPermutation)):
            if element is not None and any(g.factor for g in inside):
                # With weights, scores are lower bounds: the true gain of the order decides.
                ordered = [g.ordered(HeadPermutation(heads), element) for g in inside]
                _, gain = _gain(inside, ordered, order, problem)
                element = element if gain > 0 else None
        if element is not None:
            after = squared_distance([(a, group.kind.act(element, c, 0)) for a, c in blocks])
        matches.append(Match(element, before, after, gain))
    return matches


@solves(QueryPermutation)
def match_queries(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Assign the query heads that share a key head, for each key head on its own."""
    matches = []
    for group in groups:
        following = _following(group.within, problem)
        blocks = problem.pairs(group)
        before = after = problem.distance(group, blocks)
        kind = cast(QueryPermutation, group.kind)
        if following:
            inside = [_inside(g, problem) for g in following]
            element, gain = _gain(inside, inside, kind, problem)
        else:
            element, gain = _alike(kind, blocks)
        if gain > 0:
            after = squared_distance([(a, kind.act(element, c, 0)) for a, c in blocks])
        matches.append(Match(element if gain > 0 else None, before, after, gain))
    return matches


def _following(heads: str, problem: Problem) -> list[Group]:
    """Return the groups inside the heads of the group ``heads`` that will be matched after it."""
    asked = "attention" in problem.options.parts
    return [g for g in problem.symmetry.groups if asked and g.part == "attention" and g.within == heads]


def _inside(group: Group, problem: Problem) -> Inside:
    solver: Solver = solver_of(group)
    if not isinstance(solver, HeadSolver):
        raise SymmetryError(
            f"The group '{group.name}' lies inside heads that are to be ordered, but the solver of its "
            f"action {type(group.kind).__name__} is no fedrot.matching.inside_heads.HeadSolver."
        )
    blocks = problem.pairs(group)
    return Inside(cast(HeadRotation, group.kind), solver, blocks, *problem.evidence(group, blocks))


def _gain(
    before: Sequence[Inside], after: Sequence[Inside], order: QueryPermutation, problem: Problem
) -> tuple[Tensor, float]:
    """Return the best order of queries once heads have moved, and the gain of both together.

    The gain is the further decrease of the squared distance; 0 if within rounding.
    """
    elements = [(g, g.solver.best(g.kind, g.own_pair(), problem.options, g.precise)) for g in after]
    scores = [_summed(g.of_queries(e[i], i, i) for g, e in elements) for i in range(order.groups)]
    queries, _ = _assigned(torch.stack(scores))
    worth = sum(g.ordered(order, queries).worth(problem.options) for g in after)
    still = sum(g.worth(problem.options) for g in before)
    gain = 2 * (worth - still)
    return queries, gain if gain > MINIMUM_GAIN * abs(still) else 0.0


def _alike(kind: QueryPermutation, blocks: Sequence[Pair]) -> tuple[Tensor, float]:
    """Assign queries by the inner products of their blocks, where nothing follows inside the heads."""
    scores = torch.zeros(kind.groups, kind.n, kind.n, dtype=torch.float64)
    for pair in blocks:
        ours, theirs = (x.double().reshape(kind.groups, kind.n, -1) for x in pair)
        scores = scores.to(ours.device) + ours @ theirs.mT
    return _assigned(scores)


def head_scores(
    inside: Sequence[Inside], alone: Sequence[Pair], heads: int, options: AlignmentOptions
) -> Tensor:
    """Return the score of every pair of key heads, float64 ``[heads (anchor), heads (client)]``.

    Args:
        inside: the groups inside the heads that will be matched afterwards.
        alone: blocks that no such group moves.
        heads: the number of key heads.
        options: of the groups inside.
    """
    scores = torch.zeros(heads, heads, dtype=torch.float64)
    for a, c in alone:
        traces = torch.diagonal(_by_head((a @ c.mT).double(), heads), dim1=-2, dim2=-1).sum(-1)
        scores = scores.to(traces.device) + traces
    elements = {}
    for group in inside:
        evidence = group.every_pair()
        if group.shared() and group.factor:
            elements[group] = group.solver.best(group.kind, evidence, options, group.precise)
            worth = group.solver.value(group.kind, elements[group], evidence)
        else:
            worth = group.solver.worth(group.kind, evidence, options)
        scores = scores.to(worth.device) + worth
    if elements:
        every = [
            _summed(g.of_queries(e[i, j], i, j) for g, e in elements.items())
            for i in range(heads)
            for j in range(heads)
        ]
        # Assignments are solved on the host: one copy for all pairs.
        worth = torch.stack([_best_sum(score) for score in torch.stack(every).cpu()])
        scores = scores + worth.reshape(heads, heads).to(scores.device)
    return scores


def _assigned(scores: Tensor) -> tuple[Tensor, float]:
    """Return the best order for each of the scores ``[groups, n, n]``, and their gain together."""
    found = [best_assignment(score) for score in scores.cpu()]
    still = torch.arange(scores.shape[-1])
    orders = torch.stack([still if element is None else element for element, _ in found])
    return orders.to(scores.device), sum(gain for _, gain in found)


def _best_sum(score: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(score.numpy(), maximize=True)
    return score[rows, columns].sum()


def _summed(scores: Iterable[Tensor]) -> Tensor:
    return sum(scores, start=torch.zeros((), dtype=torch.float64))


def _by_head(matrix: Tensor, heads: int) -> Tensor:
    """Return ``[heads, heads, d, d]`` of a matrix ``[heads * d, heads * d]``."""
    return matrix.unflatten(1, (heads, -1)).unflatten(0, (heads, -1)).transpose(1, 2)
