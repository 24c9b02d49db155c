"""The stages of matching in their order, and the registry of solvers by action.

A group's action (``fedrot.symmetry.actions``) names its stage. A new kind of group needs an action,
and a solver that is registered for it::

    @solves(StreamRotation)
    def match_stream(groups, problem):
        return [Match(best_rotation(problem.pairs(group)), before, after) for group in groups]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fedrot.errors import SymmetryError
from fedrot.matching.problem import Match, Problem
from fedrot.symmetry.groups import Group

#: The stages in the order in which they run; each stage sees the elements of those before it.
STAGES = ("residual", "output", "heads", "queries", "attention", "rescale", "experts", "ffn")

#: Stages whose groups share tensors with the groups of other stages: several sweeps are needed.
COUPLED = ("residual", "output")

#: Finds the best element of each group, given all others; one ``Match`` per group, in order.
Solver = Callable[[Sequence[Group], Problem], list[Match]]

AnySolver = TypeVar("AnySolver", bound=Solver)

_SOLVERS: dict[type, Solver] = {}


def solves(*actions: type) -> Callable[[AnySolver], AnySolver]:
    """Return a decorator that registers a solver for actions of exactly these types."""

    def register(solver: AnySolver) -> AnySolver:
        _SOLVERS.update(dict.fromkeys(actions, solver))
        return solver

    return register


def solver_of(group: Group) -> Solver:
    """Return the solver of a group.

    Raises:
        SymmetryError: no solver is registered for the group's action.
    """
    action = type(group.kind)
    if action not in _SOLVERS:
        raise SymmetryError(
            f"The group '{group.name}' cannot be matched: no solver is registered for its action "
            f"{action.__name__}. Register one with @fedrot.matching.stages.solves({action.__name__})."
        )
    return _SOLVERS[action]


def stage_of(group: Group) -> str:
    """Return the stage in which a group is matched: its action's, or the one named like its part.

    Raises:
        SymmetryError: there is no such stage.
    """
    stage = group.kind.stage or group.part
    if stage not in STAGES:
        raise SymmetryError(
            f"The group '{group.name}' cannot be matched: the stage '{stage}' of its action "
            f"{type(group.kind).__name__} is not in fedrot.matching.stages.STAGES: {', '.join(STAGES)}."
        )
    return stage


def match_stage(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Match the groups of one stage, each solver's groups together; return the matches in order."""
    matches: dict[str, Match] = {}
    for solver in dict.fromkeys(map(solver_of, groups)):
        own = [group for group in groups if solver_of(group) is solver]
        matches |= {g.name: m for g, m in zip(own, solver(own, problem), strict=True)}
    return [matches[group.name] for group in groups]
