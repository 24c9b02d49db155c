"""One matcher per part: from groups and a problem to the best elements.

Every matcher maximises the similarity of ``Problem.similarity`` over its own groups, given the
elements of all others: weights, activations, or a mixture of both.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.matching import permutation, rotation
from fedrot.matching.activations import Activations
from fedrot.matching.blocks import Pair, pair, pairs, squared_distance
from fedrot.matching.heads import head_scores
from fedrot.matching.rescale import best_scale, head_products
from fedrot.moves import Move, apply_moves
from fedrot.options import AlignmentOptions
from fedrot.symmetry.description import Group, Symmetry
from fedrot.symmetry.kinds import HeadPermutation, HeadRotation, Rescale, SignedPermutation
from fedrot.validation import check_finite

Tensors = Mapping[str, Tensor]


@dataclass
class Anchor:
    """An anchor's tensors with what is computed from them once and reused for every client."""

    tensors: Tensors
    _separation: dict[tuple[str, int | None], Tensor] = field(default_factory=dict, repr=False)

    def separation(self, group: Group, columns: int | None) -> Tensor:
        """Return the memoised bound of ``permutation.separation`` for one group."""
        key = (group.name, columns)
        if key not in self._separation:
            blocks = [a for a, _ in pairs(group, self.tensors, self.tensors)]
            self._separation[key] = permutation.separation(blocks, columns)
        return self._separation[key]


@dataclass(frozen=True)
class Match:
    """The best element of one group (None: the identity), and squared distances to the anchor.

    ``gain`` is what the element is worth to the objective once the stages after it have run, in
    units of squared distance. It differs from ``before - after`` for heads, whose permutation is
    chosen for the rotation that follows, and where activations have a say.
    """

    element: Tensor | None
    before: float
    after: float
    gain: float = 0.0
    certified: bool = False


@dataclass(frozen=True)
class Problem:
    """A client on its way to an anchor: both models' tensors, and what is known beside them."""

    anchor: Anchor
    client: Tensors
    symmetry: Symmetry
    options: AlignmentOptions
    activations: Activations | None = None

    def moved(self, moves: Sequence[Move]) -> Problem:
        """Return the problem that remains after the moves."""
        activations = None if self.activations is None else self.activations.moved(moves)
        return replace(self, client=apply_moves(self.client, moves), activations=activations)

    def pairs(self, group: Group) -> list[Pair]:
        """Return the blocks of all slots of a group."""
        return pairs(group, self.anchor.tensors, self.client)

    def distance(self, group: Group, blocks: Sequence[Pair]) -> float:
        """Return the group's squared distance; raise ``UpdateError`` where it is not finite."""
        return self.finite(squared_distance(blocks), group)

    def finite(self, value: float, group: Group) -> float:
        """Return a squared distance, or raise ``UpdateError`` saying why it is not finite."""
        if not math.isfinite(value):
            for tensors in (self.client, self.anchor.tensors):
                check_finite({slot.tensor: tensors[slot.tensor] for slot in group.slots})
            raise UpdateError(
                f"The squared distance to the anchor overflows in group '{group.name}': its values are "
                "too large for float32. Check the client's training."
            )
        return value

    def evidence(self, group: Group, blocks: Sequence[Pair]) -> tuple[float, Tensor | None]:
        """Return the factor of the weights' similarity and the activations' addition to it.

        Both are in units of squared distance: a group's activations count ``w / (1 - w)`` times its
        weights, ``w`` being ``options.activation_weight``, and are all that counts where ``w`` is 1.
        """
        weight = self.options.activation_weight
        cross = None if self.activations is None else self.activations.cross(group)
        if cross is None or weight == 0:
            return 1.0, None
        cross = cross.to(blocks[0][1].device)
        norms = (torch.stack([torch.linalg.vector_norm(m).double() for m in pair]) for pair in blocks)
        size = float(torch.stack([n.square() for n in norms]).sum(0).sqrt().prod())
        if weight == 1:
            return 0.0, size * cross
        return 1.0, weight / (1 - weight) * size * cross

    def total(self, groups: Sequence[Group]) -> float:
        """Return the squared distance of all stretches that the groups act on, each counted once."""
        slots = {replace(slot, contravariant=False) for group in groups for slot in group.slots}
        shapes = self.symmetry.shapes
        whole = {s.tensor: s for s in slots if s.stop - s.start == shapes[s.tensor][s.axis]}
        parts = [slot for slot in slots if slot.tensor not in whole]
        blocks = [pair(slot, self.anchor.tensors, self.client) for slot in (*whole.values(), *parts)]
        return squared_distance(blocks)

    def objective(self, groups: Sequence[Group]) -> float:
        """Return what the matchers together minimise: squared distance, less activations' traces."""
        value = 0.0 if self.only_activations else self.total(groups)
        for group in groups:
            _, addition = self.evidence(group, self.pairs(group))
            value -= 0.0 if addition is None else 2 * float(addition.trace())
        return value

    @property
    def only_activations(self) -> bool:
        """Whether the weights have no say."""
        return self.activations is not None and self.options.activation_weight == 1


Matcher = Callable[[tuple[Group, ...], Problem], list[Match]]


def _product(blocks: Sequence[Pair]) -> Tensor:
    """Return the similarity of the weights, ``sum of A C^T`` over the blocks, ``[n, n]``."""
    total: Tensor | None = None
    for a, c in blocks:
        total = a @ c.mT if total is None else torch.addmm(total, a, c.mT)
    if total is None:
        raise ValueError("a group needs at least one slot")
    return total


def match_units(groups: tuple[Group, ...], problem: Problem) -> list[Match]:
    """Assign the units of the residual stream and of the task heads, with signs where they are free.

    A tensor with two axes in the group depends on the element twice; it is held fixed on the other
    axis while the element is found, and the element is kept only if the objective falls. Groups are
    matched one after another: they may share tensors.
    """
    matches = []
    for group in groups:
        blocks = problem.pairs(group)
        before = problem.finite(problem.total([group]), group)
        factor, addition = problem.evidence(group, blocks)
        score = factor * _product(blocks).double() if factor else torch.zeros(()).double()
        score = score if addition is None else score + addition
        signed = isinstance(group.kind, SignedPermutation)
        element, gain = permutation.best_assignment(score, signed=signed)
        if element is not None:
            moved = problem.moved([Move(group, element)])
            if max(Counter(slot.tensor for slot in group.slots).values()) > 1:
                gain = problem.objective([group]) - moved.objective([group])
            if gain > 0:
                matches.append(Match(element, before, moved.total([group]), gain))
                problem = moved
                continue
        matches.append(Match(None, before, before))
    return matches


def _distance_after(group: Group, element: Tensor, problem: Problem) -> float:
    names = {slot.tensor for slot in group.slots}
    moved = apply_moves({name: problem.client[name] for name in names}, [Move(group, element)])
    return problem.distance(group, pairs(group, problem.anchor.tensors, moved))


def match_heads(groups: tuple[Group, ...], problem: Problem) -> list[Match]:
    """Assign heads by the cost that remains after their rotation, if rotations are to follow."""
    matches = []
    for group in groups:
        inner = [
            g
            for g in problem.symmetry.select(problem.options.parts, (group.layer,))
            if g.within == group.name and isinstance(g.kind, HeadRotation)
        ]
        rotated = {slot: g.name for g in inner for slot in g.slots}
        blocks = problem.pairs(group)
        before = after = problem.distance(group, blocks)
        slots = list(zip(blocks, (rotated.get(slot) for slot in group.slots), strict=True))
        extra = {}
        factor = 1.0
        for g in inner:
            factor, addition = problem.evidence(g, [b for b, name in slots if name == g.name])
            if addition is not None:
                extra[g.name] = addition
        heads = cast(HeadPermutation, group.kind).n
        scores = head_scores(heads, slots, partial(_value_within_heads, problem.options), factor, extra)
        element, gain = permutation.best_assignment(scores)
        if element is not None:
            after = squared_distance([(a, group.kind.act(element, c, 0)) for a, c in blocks])
        matches.append(Match(element, before, after, gain))
    return matches


def _within_heads(cross: Tensor, options: AlignmentOptions, precise: bool) -> Tensor:
    if options.within_heads == "permutation":
        return rotation.best_orders(cross)
    return rotation.polar(cross, options.ridge, precise=precise)


def _value_within_heads(options: AlignmentOptions, cross: Tensor) -> Tensor:
    """Return ``<R, M>`` for the element ``R`` that would be chosen, for every pair of heads."""
    if options.within_heads == "rotation" and options.ridge == 0:
        return torch.linalg.svdvals(cross).sum(-1)
    return (_within_heads(cross, options, precise=True) * cross).sum((-1, -2))


def match_rotations(groups: tuple[Group, ...], problem: Problem) -> list[Match]:
    """Solve Procrustes for all heads of all layers of one shape in one batch."""
    batches: dict[HeadRotation, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        batches[cast(HeadRotation, group.kind)].append(index)
    matches: dict[int, Match] = {}
    for kind, indices in batches.items():
        crosses, weights, before = [], [], []
        for index in indices:
            blocks = problem.pairs(groups[index])
            before.append(problem.distance(groups[index], blocks))
            factor, addition = problem.evidence(groups[index], blocks)
            weights.append(rotation.similarity(kind, blocks))
            crosses.append(factor * weights[-1])
            if addition is not None:
                crosses[-1] = crosses[-1] + rotation.own_blocks(kind, addition)
        cross, weight = torch.stack(crosses), torch.stack(weights)
        precise = blocks[0][1].dtype == torch.float64
        best = _within_heads(cross, problem.options, precise)
        gains, removed = rotation.gain(best, cross), rotation.gain(best, weight)
        for i, index in enumerate(indices):
            if gains[i] <= rotation.MINIMUM_GAIN * float(rotation.trace(cross[i]).abs()):
                matches[index] = Match(None, before[i], before[i])
            else:
                after = max(before[i] - removed[i], 0.0)
                matches[index] = Match(best[i], before[i], after, gains[i])
    return [matches[index] for index in range(len(groups))]


def match_scales(groups: tuple[Group, ...], problem: Problem) -> list[Match]:
    """Solve the quartic of each head."""
    matches = []
    for group in groups:
        blocks = problem.pairs(group)
        before = problem.distance(group, blocks)
        sides = [slot.contravariant for slot in group.slots]
        heads = cast(Rescale, group.kind).heads
        element, gains = best_scale(*head_products(heads, blocks, sides))
        gain = float(gains.sum())
        after = max(before - gain, 0.0)
        matches.append(Match(element if gain > 0 else None, before, after, gain))
    return matches


def match_neurons(groups: tuple[Group, ...], problem: Problem) -> list[Match]:
    """Certify the identity from distances alone where possible, else solve the assignment."""
    matches = []
    for group in groups:
        blocks = problem.pairs(group)
        distances = permutation.row_distances(blocks)
        before = problem.finite(float(distances.sum()), group)
        factor, addition = problem.evidence(group, blocks)
        if addition is not None:
            score = addition + (factor * _product(blocks).double() if factor else 0.0)
            element, gain = permutation.best_assignment(score)
            after = before if element is None else _distance_after(group, element, problem)
            matches.append(Match(element, before, after, gain))
        elif permutation.identity_certified(distances, partial(problem.anchor.separation, group)):
            matches.append(Match(None, before, before, certified=True))
        else:
            element, gain = permutation.assignment(_product(blocks))
            matches.append(Match(element, before, max(before - gain, 0.0), gain))
    return matches


#: The matcher of each part, in the order in which the stages run.
STAGES: dict[str, Matcher] = {
    "residual": match_units,
    "output": match_units,
    "heads": match_heads,
    "attention": match_rotations,
    "rescale": match_scales,
    "ffn": match_neurons,
}
