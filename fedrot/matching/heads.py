"""What lies inside heads, solved; and which head belongs where (Verma & Elbayad 2024, Alg. 1).

The score of client head ``j`` at anchor slot ``i`` is what the best rotation of that pair is worth.
Where query heads share a key head, the rotation is found from keys and values, which each group has
once; then the query heads of the pair of groups are assigned to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedrot.matching import procrustes, rotary
from fedrot.matching.assignment import best_assignment
from fedrot.matching.pairs import Pair
from fedrot.options import AlignmentOptions
from fedrot.symmetry.actions import HeadPermutation, HeadRotation, QueryPermutation
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns


@dataclass(frozen=True)
class Solver:
    """Closed forms for one kind of group inside heads.

    ``similarity`` of blocks and ``of_cross`` of cross matrices ``[..., d, d]`` give the evidence
    ``[heads, ...]`` or ``[..., ...]``; ``best`` the element it asks for; ``value``, ``still`` and
    ``worth`` what an element, the identity and the best element are worth, ``<R, M>``.
    """

    similarity: Callable[[Any, Sequence[Pair]], Tensor]
    of_cross: Callable[[Any, Tensor], Tensor]
    best: Callable[[Any, Tensor, AlignmentOptions, bool], Tensor]
    value: Callable[[Any, Tensor, Tensor], Tensor]
    still: Callable[[Any, Tensor], Tensor]
    worth: Callable[[Any, Tensor, AlignmentOptions], Tensor]


def _solver(module: Any) -> Solver:
    return Solver(
        module.similarity, module.of_cross, module.best, module.value, module.still, module.worth
    )


#: How each kind of group inside heads is solved.
SOLVERS: Mapping[type, Solver] = {
    HeadRotation: _solver(procrustes),
    RotaryPhases: _solver(rotary),
    RotarySigns: _solver(rotary),
}


@dataclass(frozen=True, eq=False)
class Inside:
    """A group inside heads as it looks to whoever orders the heads.

    ``extra`` are cross matrices ``[heads * dim, heads * dim]`` beside those of the blocks, of which
    those that key heads have once count ``factor`` times; where it is 0, those of queries have no say
    in the order of the key heads either, only in their own.
    """

    kind: HeadRotation | RotaryPhases | RotarySigns
    blocks: Sequence[Pair]
    factor: float = 1.0
    extra: Tensor | None = None

    @property
    def solver(self) -> Solver:
        return SOLVERS[type(self.kind)]

    @property
    def precise(self) -> bool:
        """Whether the blocks are float64."""
        return self.blocks[0][1].dtype == torch.float64

    def own(self) -> Sequence[Pair]:
        """Return the blocks that key heads have once."""
        return [pair for pair in self.blocks if len(pair[0]) == self.kind.heads * self.kind.dim]

    def shared(self) -> Sequence[Pair]:
        """Return the blocks in which several query heads share a key head."""
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
        """Return what the best elements are worth to heads in their own places."""
        evidence = self.factor * self.solver.similarity(self.kind, self.own())
        if self.shared():
            evidence = evidence + self.solver.similarity(self.kind, self.shared())
        if self.extra is not None:
            own = own_blocks(self.extra, self.kind.heads)
            evidence = evidence + self.solver.of_cross(self.kind, own)
        return float(self.solver.worth(self.kind, evidence, options).sum())


def every_pair(inside: Inside) -> Tensor:
    """Return the evidence for every pair of key heads, ``[heads (anchor), heads (client), ...]``."""
    heads = inside.kind.heads
    cross = torch.zeros((), dtype=torch.float64)
    for a, c in inside.own():
        product = inside.factor * by_head((a @ c.mT).double(), heads)
        cross = cross.to(product.device) + product
    if inside.extra is not None:
        cross = cross + by_head(inside.extra, heads)
    return inside.solver.of_cross(inside.kind, cross)


def own_pair(inside: Inside) -> Tensor:
    """Return the evidence for key heads in their own places, ``[heads, ...]``."""
    kind = inside.kind
    cross = torch.zeros((), dtype=torch.float64)
    for pair in inside.own():
        a, c = (x.unflatten(0, (kind.heads, kind.dim)) for x in pair)
        product = inside.factor * torch.bmm(a, c.mT).double()
        cross = cross.to(product.device) + product
    if inside.extra is not None:
        cross = cross + own_blocks(inside.extra, kind.heads)
    return inside.solver.of_cross(kind, cross)


def head_scores(
    inside: Sequence[Inside], alone: Sequence[Pair], heads: int, options: AlignmentOptions
) -> Tensor:
    """Return the score of every pair of key heads, float64 ``[heads (anchor), heads (client)]``.

    Args:
        inside: the groups that follow the heads' order.
        alone: blocks that no such group moves.
        heads: the number of key heads.
        options: of what follows.
    """
    scores = torch.zeros(heads, heads, dtype=torch.float64)
    for a, c in alone:
        traces = torch.diagonal(by_head((a @ c.mT).double(), heads), dim1=-2, dim2=-1).sum(-1)
        scores = scores.to(traces.device) + traces
    elements = {}
    for group in inside:
        evidence = every_pair(group)
        if group.shared() and group.factor:
            elements[group] = group.solver.best(group.kind, evidence, options, group.precise)
            worth = group.solver.value(group.kind, elements[group], evidence)
        else:
            worth = group.solver.worth(group.kind, evidence, options)
        scores = scores.to(worth.device) + worth
    if elements:
        every = [
            _summed(_of_queries(g, e[i, j], i, j) for g, e in elements.items())
            for i in range(heads)
            for j in range(heads)
        ]
        # The host assigns: one copy for all pairs.
        worth = torch.stack([_best_sum(score) for score in torch.stack(every).cpu()])
        scores = scores + worth.reshape(heads, heads).to(scores.device)
    return scores


def query_orders(inside: Sequence[Inside], order: QueryPermutation, options: AlignmentOptions) -> Tensor:
    """Return the best order of the query heads inside each group, ``[groups, n]``, keys unmoved."""
    return assigned(query_scores(inside, order.groups, options))[0]


def assigned(scores: Tensor) -> tuple[Tensor, float]:
    """Return the best order for each of the scores ``[groups, n, n]``, and what they gain together."""
    found = [best_assignment(score) for score in scores.cpu()]
    still = torch.arange(scores.shape[-1])
    orders = torch.stack([still if element is None else element for element, _ in found])
    return orders.to(scores.device), sum(gain for _, gain in found)


def query_scores(inside: Sequence[Inside], groups: int, options: AlignmentOptions) -> Tensor:
    """Return the score of every pair of query heads of the same group, ``[groups, n, n]``."""
    elements = [(g, g.solver.best(g.kind, own_pair(g), options, g.precise)) for g in inside]
    return torch.stack([_summed(_of_queries(g, e[i], i, i) for g, e in elements) for i in range(groups)])


def _summed(scores: Iterable[Tensor]) -> Tensor:
    return sum(scores, start=torch.zeros((), dtype=torch.float64))


def _of_queries(inside: Inside, element: Tensor, i: int, j: int) -> Tensor:
    """Return ``<a_h, R c_k>`` for the query heads of anchor group ``i`` and client group ``j``.

    Weights alone decide here: activations are seen where key heads have them once.
    """
    one = replace(inside.kind, heads=1)
    scores = []
    for a, c in inside.shared():
        ours = a.unflatten(0, (inside.kind.heads, -1))[i]
        theirs = one.act(element[None], c.unflatten(0, (inside.kind.heads, -1))[j], 0)
        n = len(ours) // inside.kind.dim
        scores.append((ours.reshape(n, -1) @ theirs.reshape(n, -1).mT).double())
    return _summed(scores)


def _best_sum(score: Tensor) -> Tensor:
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(score.numpy(), maximize=True)
    return score[rows, columns].sum()


def own_blocks(matrix: Tensor, heads: int) -> Tensor:
    """Return the blocks of head with same head, ``[heads, d, d]``, of a matrix ``[heads * d] * 2``."""
    return torch.diagonal(by_head(matrix, heads)).movedim(-1, 0)


def by_head(matrix: Tensor, heads: int) -> Tensor:
    """Return ``[heads, heads, d, d]`` of a matrix ``[heads * d, heads * d]``."""
    return matrix.unflatten(1, (heads, -1)).unflatten(0, (heads, -1)).transpose(1, 2)
