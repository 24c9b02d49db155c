"""The matching problem of one client: ``Problem``, ``Match``, and solvers by action.

A group's action (``fedrot.symmetry.actions``) names its stage. A new kind of group
needs an action, and a registered solver::

    @solves(StreamRotation) def match_stream(groups, problem): return
        [Match(best_rotation(problem.pairs(group)), before, after) for group in groups]
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from fedrot.collect.activations import Activations
from fedrot.errors import SymmetryError, UpdateError
from fedrot.matching.anchor import Side
from fedrot.matching.pairs import (
    Pair,
    Pairs,
    T,
    entries_once,
    moved_pairs,
    norms,
    pairs,
    squared_distance,
)
from fedrot.options import AlignmentOptions
from fedrot.symmetry.groups import Group, Move, Symmetry, apply_moves
from fedrot.tensors import LARGEST_NORM, Tensors, check_finite

Groups = Sequence[Group]

Result = TypeVar("Result")

#: The factor of the weights' similarity, and the activations' term to add to it.
Evidence = tuple[float, Tensor | None]


@dataclass(frozen=True)
class Match:
    """The best element of one group, and the group's squared distances to the anchor.

    Attributes:
        element: None for the identity.
        before: squared distance of the group's weights before the move.
        after: squared distance after the move.
        gain: decrease of the objective, in units of squared distance. It differs from
            ``before - after`` for head permutations, which include the best rotation
            inside the heads, and if activations are used. If no element gains enough
            (``matching.chance.threshold_of``), ``gain`` may be an upper bound, and
            ``element`` is None.
        certified: squared distances ``[n]`` of the units, if they prove that the
            identity is optimal.
    """

    element: Tensor | None
    before: float
    after: float
    gain: float = 0.0
    certified: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """The tensors of an anchor and of a client, the options, and activations if any.

    ``applied`` names the groups whose moves are already applied to the client's
    tensors.
    """

    anchor: Side
    client: Tensors
    symmetry: Symmetry
    options: AlignmentOptions
    activations: Activations | None = None
    applied: frozenset[str] = frozenset()

    def moved(self, moves: Sequence[Move]) -> Problem:
        """Return the problem with the moves applied to the client."""
        activations = self.activations
        if activations is not None:
            activations = activations.moved(moves)
        return replace(
            self,
            client=apply_moves(self.client, moves),
            activations=activations,
            applied=self.applied.union(move.group.name for move in moves),
        )

    def pairs(self, group: Group) -> list[Pair]:
        """Return the pairs of all slots of a group."""
        return pairs(group, self.anchor.tensors, self.client)

    def distance(
        self,
        group: Group,
        blocks: Pairs,
    ) -> float:
        """Return the squared distance of a group's pairs, as ``finite`` does."""
        return self.finite(float(squared_distance(blocks)), group)

    def finite(
        self,
        value: float,
        group: Group,
    ) -> float:
        """Return a group's squared distance; raise the errors of ``check_finite``.

        Where the distance is small, the tensors are finite, since the anchor's are.
        """
        if value <= LARGEST_NORM**2 / 4:
            return value
        for tensors in (self.client, self.anchor.tensors):
            check_finite({slot.tensor: tensors[slot.tensor] for slot in group.slots})
        if math.isfinite(value):
            return value
        raise UpdateError(
            "The squared distance to the anchor overflows in group "
            f"'{group.name}': values are too large for float32. Check the client's "
            "training."
        )

    def evidence(
        self,
        group: Group,
        blocks: Pairs | None = None,
    ) -> Evidence:
        """Return the factor of the weights' similarity, and the activations' term.

        ``blocks`` are the group's pairs, if the caller has computed them. Both results
        are in units of squared distance. With ``w = options.activation_weight``, a
        group's activations have ``w / (1 - w)`` times the weight of its tensors; with
        ``w = 1`` the factor is 0.
        """
        weight = self.options.activation_weight
        if self.activations is None or weight == 0:
            return 1.0, None
        cross = self.activations.matrices.get(group.name)
        if cross is None:
            return 1.0, None
        if blocks is None:
            blocks = self.pairs(group)
        sizes = norms(blocks).square().sum(0).sqrt()
        # Activations are scaled to traces of at most 1, weights have the groups' norms.
        size = float(sizes.prod())
        cross = cross.to(sizes.device)
        if weight == 1:
            return 0.0, size * cross
        return 1.0, weight / (1 - weight) * size * cross

    def total(self, groups: Groups) -> float:
        """Return the squared distance of all entries that the groups act on.

        Each entry is counted once.
        """
        slots = dict.fromkeys(slot for group in groups for slot in group.slots)
        return float(
            squared_distance(entries_once(slots, self.anchor.tensors, self.client))
        )

    def objective(self, groups: Groups) -> float:
        """Return the solvers' objective.

        It is the squared distance minus twice the traces of the activations' terms.
        """
        value = 0.0
        if self.activations is None or self.options.activation_weight != 1:
            value = self.total(groups)
        for group in groups:
            _, addition = self.evidence(group)
            if addition is not None:
                value -= 2 * float(addition.trace())
        return value


def match_by(
    group: Group,
    blocks: Pairs,
    before: float,
    element: Tensor | None,
    gain: float,
) -> Match:
    """Return the match of an element that acts on the rows of a group's pairs.

    ``before`` is the squared distance of the pairs.
    """
    after = before
    if element is not None:
        after = float(squared_distance(moved_pairs(group.action, element, blocks)))
    return Match(element, before, after, gain)


#: The stages in the order in which they run; each stage sees the elements of earlier
#: stages.
STAGES = (
    "residual",
    "output",
    "heads",
    "queries",
    "attention",
    "experts",
    "ffn",
)

#: Stages whose groups share tensors with groups of other stages, so that several sweeps
#: are needed.
COUPLED = ("residual", "output")

#: Finds the best element of each group, given all others; one ``Match`` per group, in
#: order.
Solver = Callable[[Groups, Problem], list[Match]]

AnySolver = TypeVar("AnySolver", bound=Solver)

#: The solvers by the exact type of the action.
SOLVERS: dict[type, Solver] = {}


def solves(*actions: type) -> Callable[[AnySolver], AnySolver]:
    """Return a decorator that registers a solver for actions of exactly these types."""

    def register(solver: AnySolver) -> AnySolver:
        SOLVERS.update(dict.fromkeys(actions, solver))
        return solver

    return register


def each(match: Callable[[Group, Problem], Match]) -> Solver:
    """Return a solver that matches one group after another."""

    def solver(
        groups: Groups,
        problem: Problem,
    ) -> list[Match]:
        return [match(group, problem) for group in groups]

    return solver


def solver_of(group: Group) -> Solver:
    """Return the solver of a group.

    Raises:
        SymmetryError: no solver is registered for the group's action.
    """
    action = type(group.action)
    if action not in SOLVERS:
        raise SymmetryError(
            f"The group '{group.name}' cannot be matched: no solver is registered for "
            f"its action {action.__name__}. Register one with "
            f"@fedrot.matching.problem.solves({action.__name__})."
        )
    return SOLVERS[action]


def stage_of(group: Group) -> str:
    """Return the stage in which a group is matched: its action's, or its part.

    Raises:
        SymmetryError: there is no such stage.
    """
    stage = group.action.stage or group.part
    if stage not in STAGES:
        raise SymmetryError(
            f"The group '{group.name}' cannot be matched: the stage '{stage}' of its "
            f"action {type(group.action).__name__} is not in "
            f"fedrot.matching.problem.STAGES: {', '.join(STAGES)}."
        )
    return stage


def match_stage(
    groups: Groups,
    problem: Problem,
) -> list[Match]:
    """Return the matches of one stage's groups in order.

    Each solver gets all of its groups at once.
    """
    return in_batches(
        groups, solver_of, lambda members: solver_of(members[0])(members, problem)
    )


def in_batches(
    items: Sequence[T],
    key: Callable[[T], object],
    solve: Callable[[list[T]], list[Result]],
) -> list[Result]:
    """Solve the items of each key together; return the results in the items' order."""
    batches: dict[object, list[int]] = defaultdict(list)
    for place, item in enumerate(items):
        batches[key(item)].append(place)
    results: dict[int, Result] = {}
    for places in batches.values():
        members = [items[place] for place in places]
        results.update(zip(places, solve(members), strict=True))
    return [results[place] for place in sorted(results)]


def tensors_of(groups: Iterable[Group]) -> set[str]:
    """Return the names of all tensors that groups act on."""
    return {slot.tensor for group in groups for slot in group.slots}
