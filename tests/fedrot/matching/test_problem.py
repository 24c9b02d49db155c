"""Solvers belong to actions: what is registered is used, what is not is refused by
name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedrot import AlignmentOptions, SymmetryError, align
from fedrot.matching import problem as of_problem
from fedrot.matching.problem import Match, solver_of, solves, stage_of
from fedrot.symmetry.actions import HeadRotation, Permutation
from fedrot.symmetry.groups import Move, apply_moves
from tests.models import largest_difference, near, state_of, symmetry_for

NAME = "bert-classifier"


@dataclass(frozen=True)
class Reversal(Permutation):
    """Either all units in reverse order, or none: a group that fedrot does not know."""

    stage: ClassVar[str] = "heads"


class HeadLinear(HeadRotation):
    """``GL(dim)`` in each head, which contains the rotations."""


def _with_reversals(symmetry):
    groups = [
        replace(g, action=Reversal(g.action.units)) if g.part == "ffn" else g
        for g in symmetry.groups
    ]
    return replace(symmetry, groups=tuple(groups))


def _match_reversals(groups, problem):
    matches = []
    for group in groups:
        element = torch.arange(group.action.units).flip(0)
        before = problem.total([group])
        after = problem.moved([Move(group, element)]).total([group])
        best = element if after < before else None
        matches.append(
            Match(best, before, min(before, after), max(before - after, 0.0))
        )
    return matches


@dataclass(frozen=True)
class Late(Permutation):
    """An action whose stage does not exist."""

    stage: ClassVar[str] = "late"


#: Actions in place of those of a part, and what is told.
REFUSED = {
    "no solver": (
        "ffn",
        lambda k: Reversal(k.units),
        r"solver .* action Reversal.*solves\(Reversal\)",
    ),
    # Rotations solved for in ``GL(d)`` would be wrong without a word.
    "not inherited": (
        "attention",
        lambda k: HeadLinear(k.heads, k.dim),
        "action HeadLinear",
    ),
    "stage": (
        "ffn",
        lambda k: Late(k.units),
        r"stage 'late' of its action Late .*: residual",
    ),
}


@pytest.mark.parametrize(("part", "action", "told"), REFUSED.values(), ids=REFUSED)
def test_an_action_that_cannot_be_matched_is_refused_by_name(
    part,
    action,
    told,
    monkeypatch,
):
    monkeypatch.setattr(of_problem, "SOLVERS", dict(of_problem.SOLVERS))
    solves(Late)(_match_reversals)
    state = state_of(NAME)
    symmetry = symmetry_for(NAME)
    groups = tuple(
        replace(g, action=action(g.action)) if g.part == part else g
        for g in symmetry.groups
    )
    name = next(g.name for g in groups if g.part == part)
    with pytest.raises(SymmetryError, match=f"group '{name}' .*{told}"):
        align(state, state, replace(symmetry, groups=groups))
    # The other groups are matched as ever.
    rest = AlignmentOptions(parts=("ffn",) if part == "attention" else ("attention",))
    align(state, state, replace(symmetry, groups=groups), rest)


def test_a_registered_solver_is_used_in_the_stage_of_its_action(
    monkeypatch,
):
    monkeypatch.setattr(of_problem, "SOLVERS", dict(of_problem.SOLVERS))
    called = []

    @solves(Reversal)
    def match(groups, problem):
        called.append(len(groups))
        return _match_reversals(groups, problem)

    symmetry = _with_reversals(symmetry_for(NAME))
    anchor = state_of(NAME)
    order = []
    for group in symmetry.groups:
        if isinstance(group.action, Reversal):
            assert stage_of(group) == "heads"
            assert solver_of(group) is match
            order.append(Move(group, torch.arange(group.action.units).flip(0)))
    client = near(anchor, 0.01)
    moved = apply_moves(client, order)
    options = AlignmentOptions(parts=("ffn",), chance=0)
    alignment = align(moved, anchor, symmetry, options)
    assert called == [len(order)] == [2]
    assert largest_difference(alignment.apply(moved), client) == 0
    assert [row.moved for row in alignment.report.groups] == [
        g.group.action.units for g in order
    ]
