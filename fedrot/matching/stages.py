"""One matcher per part: from groups and a problem to the best elements.

Every matcher maximises the similarity of ``Problem.similarity`` over its own groups, given the
elements of all others: weights, activations, or a mixture of both.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor

from fedrot.collect.activations import Activations
from fedrot.errors import UpdateError
from fedrot.matching import assignment
from fedrot.matching.heads import (
    SOLVERS,
    Inside,
    Solver,
    assigned,
    head_scores,
    own_blocks,
    query_orders,
)
from fedrot.matching.pairs import Pair, distance_once, pairs, squared_distance
from fedrot.matching.scale import best_scale, head_products
from fedrot.options import AlignmentOptions
from fedrot.symmetry.actions import (
    HeadPermutation,
    HeadRotation,
    Kind,
    QueryPermutation,
    Rescale,
    SignedPermutation,
)
from fedrot.symmetry.groups import Group, Symmetry
from fedrot.symmetry.mixture import ExpertNeurons, ExpertPermutation
from fedrot.tensors import Tensors, check_finite
from fedrot.transport import Move, apply_moves

T = TypeVar("T")

#: Parts that share tensors with others: the best element of one depends on the others.
COUPLED = ("residual", "output")


@dataclass
class Anchor:
    """An anchor's tensors with what is computed from them once and reused for every client."""

    tensors: Tensors
    _separation: dict[tuple[str, int | None], Tensor] = field(default_factory=dict, repr=False)
    _last: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _sizes: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def separation(self, group: Group, columns: int | None) -> Tensor:
        """Return the memoised bound of ``assignment.separation`` for one group."""
        key = (group.name, columns)
        if key not in self._separation:
            blocks = [a for a, _ in pairs(group, self.tensors, self.tensors)]
            self._separation[key] = assignment.separation(*by_sign(group, blocks), columns)
            self._sizes.setdefault(group.name, assignment.largest(blocks))
        return self._separation[key]

    def note(self, group: Group, distances: Tensor) -> None:
        """Remember the squared distances ``[n]`` of a client's neurons, which stay where they are."""
        self._last[group.name] = distances

    def towards_last(self, tensors: Tensors, share: float) -> Anchor:
        """Return the anchor that lies ``share`` of the way to the last client aligned to this one.

        Its neurons have moved no further than that, so the bounds on their separation still hold, less
        the way of the neuron itself and of the others, and what rounding moved them.

        Args:
            tensors: the new anchor's.
            share: 0 to 1.
        """
        moved = Anchor(tensors)
        for (name, columns), bound in self._separation.items():
            if name in self._last:
                way = share * self._last[name].sqrt() * assignment.SLACK
                size = self._sizes[name] + way.max()
                rounding = 4 * torch.finfo(torch.float32).eps * size
                moved._separation[name, columns] = (bound - way - way.max() - rounding).clamp_min(0)
                moved._sizes[name] = size
        return moved


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
        """Return the squared distance of all entries that the groups act on, each counted once."""
        slots = dict.fromkeys(slot for group in groups for slot in group.slots)
        return distance_once(slots, self.anchor.tensors, self.client)

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

#: What lies inside heads must gain more than this share of ``|trace|``: what is below is rounding.
MINIMUM_GAIN = 1e-12


def _product(blocks: Sequence[Pair]) -> Tensor:
    """Return the similarity of the weights, ``sum of A C^T`` over the blocks, ``[n, n]``; 0 if none."""
    total: Tensor | None = None
    for a, c in blocks:
        total = a @ c.mT if total is None else torch.addmm(total, a, c.mT)
    return torch.zeros(()) if total is None else total


def by_sign(group: Group, blocks: Sequence[T]) -> tuple[list[T], list[T]]:
    """Return what belongs to slots whose signs stay, and to those whose signs the group may change."""
    signed = isinstance(group.kind, SignedPermutation | ExpertNeurons)
    sides: tuple[list[T], list[T]] = ([], [])
    for slot, block in zip(group.slots, blocks, strict=True):
        sides[signed and not slot.unsigned].append(block)
    return sides


def _unit_scores(
    group: Group, blocks: Sequence[Pair], factor: float, extra: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the scores of units without and, where signs are free, with a sign."""
    plain, turned = (
        factor * _product(side) if factor else torch.zeros(()) for side in by_sign(group, blocks)
    )
    signed = isinstance(group.kind, SignedPermutation)
    if extra is not None:
        plain, turned = (plain, turned + extra) if signed else (plain + extra, turned)
    return plain, turned if signed else None


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
        scores = _unit_scores(group, blocks, factor, addition)
        element, gain = assignment.best_assignment(*scores)
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


def _alone(group: Group, inside: Sequence[Group], blocks: Sequence[Pair]) -> list[Pair]:
    """Return the blocks of a group on axes that nothing inside the heads moves."""
    moved = {(slot.tensor, slot.axis) for g in inside for slot in g.slots}
    return [
        b for slot, b in zip(group.slots, blocks, strict=True) if (slot.tensor, slot.axis) not in moved
    ]


def match_heads(groups: tuple[Group, ...], problem: Problem) -> list[Match]:
    """Assign heads by the cost that remains after what follows inside them."""
    matches = []
    for group in groups:
        following = _following(group.name, problem)
        blocks = problem.pairs(group)
        before = after = problem.distance(group, blocks)
        heads = cast(HeadPermutation, group.kind).n
        inside = [_seen(g, problem) for g in following]
        scores = head_scores(inside, _alone(group, following, blocks), heads, problem.options)
        element, gain = assignment.best_assignment(scores)
        queries = [g.kind for g in problem.symmetry.groups if g.within == group.name]
        for order in (kind for kind in queries if isinstance(kind, QueryPermutation)):
            if element is not None and any(g.factor for g in inside):
                # With weights, scores are lower bounds; the order counts only if truly worth more.
                moved = [g.ordered(HeadPermutation(heads), element) for g in inside]
                _, gain = _gain(inside, moved, order, problem)
                element = element if gain > 0 else None
        if element is not None:
            after = squared_distance([(a, group.kind.act(element, c, 0)) for a, c in blocks])
        matches.append(Match(element, before, after, gain))
    return matches


def match_queries(groups: tuple[Group, ...], problem: Problem) -> list[Match]:
    """Assign the query heads that share a key head, group by group."""
    matches = []
    for group in groups:
        following = _following(group.within, problem)
        blocks = problem.pairs(group)
        before = after = problem.distance(group, blocks)
        kind = cast(QueryPermutation, group.kind)
        if following:
            inside = [_seen(g, problem) for g in following]
            element, gain = _gain(inside, inside, kind, problem)
        else:
            element, gain = _alike(kind, blocks)
        if gain > 0:
            after = squared_distance([(a, kind.act(element, c, 0)) for a, c in blocks])
        matches.append(Match(element if gain > 0 else None, before, after, gain))
    return matches


def _gain(
    before: Sequence[Inside], after: Sequence[Inside], order: QueryPermutation, problem: Problem
) -> tuple[Tensor, float]:
    """Return the best order of queries once heads have moved, and what both together are worth.

    The worth is by how much the squared distance falls further than without; 0 if within rounding.
    """
    queries = query_orders(after, order, problem.options)
    worth = sum(g.ordered(order, queries).worth(problem.options) for g in after)
    still = sum(g.worth(problem.options) for g in before)
    gain = 2 * (worth - still)
    return queries, gain if gain > assignment.MINIMUM_GAIN * abs(still) else 0.0


def _alike(kind: QueryPermutation, blocks: Sequence[Pair]) -> tuple[Tensor, float]:
    """Assign queries by the inner products of their blocks, where nothing follows inside the heads."""
    scores = torch.zeros(kind.groups, kind.n, kind.n, dtype=torch.float64)
    for pair in blocks:
        ours, theirs = (x.double().reshape(kind.groups, kind.n, -1) for x in pair)
        scores = scores.to(ours.device) + ours @ theirs.mT
    return assigned(scores)


def _following(heads: str, problem: Problem) -> list[Group]:
    """Return the groups that will move inside the heads which the group ``heads`` orders."""
    asked = "attention" in problem.options.parts
    return [g for g in problem.symmetry.groups if asked and g.part == "attention" and g.within == heads]


def _seen(group: Group, problem: Problem) -> Inside:
    blocks = problem.pairs(group)
    return Inside(cast(HeadRotation, group.kind), blocks, *problem.evidence(group, blocks))


def match_inside_heads(groups: tuple[Group, ...], problem: Problem) -> list[Match]:
    """Solve for all heads of all layers of one kind in one batch."""
    batches: dict[Kind, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        batches[group.kind].append(index)
    matches: dict[int, Match] = {}
    for kind, indices in batches.items():
        solver = SOLVERS[type(kind)]
        crosses, weights, before = [], [], []
        for index in indices:
            blocks = problem.pairs(groups[index])
            before.append(problem.distance(groups[index], blocks))
            factor, addition = problem.evidence(groups[index], blocks)
            weights.append(solver.similarity(kind, blocks))
            crosses.append(factor * weights[-1])
            if addition is not None:
                own = own_blocks(addition, kind.units)
                crosses[-1] = crosses[-1] + solver.of_cross(kind, own)
        cross, weight = torch.stack(crosses), torch.stack(weights)
        precise = blocks[0][1].dtype == torch.float64
        best = solver.best(kind, cross, problem.options, precise)

        def gain(
            evidence: Tensor, solver: Solver = solver, kind: Kind = kind, best: Tensor = best
        ) -> Tensor:
            return 2 * (solver.value(kind, best, evidence) - solver.still(kind, evidence)).sum(1)

        gains, removed = gain(cross).tolist(), gain(weight).tolist()
        trace = solver.still(kind, cross).sum(1).abs().tolist()
        for i, index in enumerate(indices):
            if gains[i] <= MINIMUM_GAIN * trace[i]:
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
        distances = assignment.row_distances(blocks)
        before = problem.finite(float(distances.sum()), group)
        factor, addition = problem.evidence(group, blocks)
        if addition is not None:
            element, gain = assignment.best_assignment(*_unit_scores(group, blocks, factor, addition))
            after = before if element is None else _distance_after(group, element, problem)
            matches.append(Match(element, before, after, gain))
        elif assignment.identity_certified(distances, partial(problem.anchor.separation, group)):
            if not set(COUPLED) & set(problem.options.parts):
                problem.anchor.note(group, distances)
            matches.append(Match(None, before, before, certified=True))
        else:
            element, gain = assignment.assignment(*_unit_scores(group, blocks, 1.0, None))
            matches.append(Match(element, before, max(before - gain, 0.0), gain))
    return matches


def _match_experts(groups: tuple[Group, ...], problem: Problem) -> list[Match]:
    from fedrot.matching.experts import match_experts

    return match_experts(groups, problem)


def _match_expert_neurons(groups: tuple[Group, ...], problem: Problem) -> list[Match]:
    from fedrot.matching.experts import match_expert_neurons

    return match_expert_neurons(groups, problem)


#: The matcher of each stage, in the order in which they run.
STAGES: dict[str, Matcher] = {
    "residual": match_units,
    "output": match_units,
    "heads": match_heads,
    "queries": match_queries,
    "attention": match_inside_heads,
    "rescale": match_scales,
    "experts": _match_experts,
    "expert neurons": _match_expert_neurons,
    "ffn": match_neurons,
}


def stage_of(group: Group) -> str:
    """Return the stage in which a group is matched."""
    own = {
        QueryPermutation: "queries",
        ExpertPermutation: "experts",
        ExpertNeurons: "expert neurons",
    }
    return own.get(type(group.kind), group.part)
