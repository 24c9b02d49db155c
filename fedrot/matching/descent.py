"""Coordinate descent: sweeps over all stages, each solved exactly given the others.

Source: Ainsworth et al. 2023 (Git Re-Basin), Algorithm 1, extended from permutations of
neurons to heads, rotations, signs and the residual stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from fedrot.matching.candidates import beyond_chance, candidates_of
from fedrot.matching.pairs import Masks
from fedrot.matching.problem import (
    COUPLED,
    STAGES,
    Groups,
    Match,
    Problem,
    match_stage,
    solver_of,
    stage_of,
    tensors_of,
)
from fedrot.report import AlignmentReport, GroupReport
from fedrot.symmetry.groups import Group, Move, Slot
from fedrot.tensors import TensorDict, Tensors

#: Maximum number of passes over all stages if groups depend on each other.
SWEEPS = 20

#: Passes stop when a pass lowers the objective by less than this share.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Solution:
    """The best moves, one per moved group in the order of application.

    The report's ``seconds`` are 0. ``certified`` is ``Match.certified`` by group name;
    empty if groups depend on each other.
    """

    moves: tuple[Move, ...]
    report: AlignmentReport
    certified: Tensors


def solve(
    problem: Problem,
    groups: Groups,
) -> Solution:
    """Return the best moves for the groups, and their report.

    Raises:
        SymmetryError: a group's action has no solver or no stage.
    """
    descent = _Descent(problem, groups)
    if not descent.coupled:
        descent.sweep()
        before = descent.first_seen
        removed = sum(row.before - row.after for row in descent.rows.values())
        return descent.solution(before, max(before - removed, 0.0))
    descent.run()
    return descent.solution(problem.total(groups), descent.problem.total(groups))


class _Descent:
    """One run of coordinate descent: the problem after the moves so far, and rows."""

    def __init__(
        self,
        problem: Problem,
        groups: Groups,
    ) -> None:
        self.problem = problem
        self.groups = groups
        self.stages: dict[str, list[Group]] = {stage: [] for stage in STAGES}
        for group in groups:
            # A group without a solver is refused before anything is matched.
            solver_of(group)
            self.stages[stage_of(group)].append(group)
        slots = sum(len(group.slots) for group in groups)
        shares = any(group.part in COUPLED for group in groups)
        # One sweep is enough if no tensor lies on two slots, even in parts that usually
        # share tensors.
        self.coupled = shares and len(tensors_of(groups)) < slots
        self.moves: list[Move] = []
        self.rows: dict[str, GroupReport] = {}
        self.certified: TensorDict = {}
        self.first_seen = 0.0
        #: The entries that groups act on.
        self._seen: Masks = defaultdict(dict)

    def run(self) -> None:
        """Sweep until the objective falls by less than the tolerance."""
        self._start()
        objective = self.problem.objective(self.groups)
        if self.moves:
            # Match the layers in the new order of the stream before the stream is
            # matched again.
            self.sweep(skip="residual")
        for _ in range(SWEEPS):
            before = objective
            self.sweep()
            objective = self.problem.objective(self.groups)
            if before - objective < TOLERANCE * abs(before):
                break

    def _start(self) -> None:
        """Choose a first element of the residual stream.

        This element matches activations and the tensors that no other stage moves
        (embeddings, norms, biases). It is kept if the objective falls.
        """
        residual = self.stages["residual"]
        elsewhere = tensors_of(group for group in self.groups if group not in residual)
        for group in residual:
            alone = tuple(slot for slot in group.slots if slot.tensor not in elsewhere)
            if not alone:
                continue
            (match,) = match_stage([replace(group, slots=alone)], self.problem)
            if match.element is None:
                continue
            move = Move(group, match.element)
            moved = self.problem.moved([move])
            if moved.objective([group]) < self.problem.objective([group]):
                before = self.problem.total([group])
                self._note(group, Match(None, before, moved.total([group])))
                self.moves.append(move)
                self.problem = moved

    def sweep(self, skip: str = "") -> None:
        """Run every stage except ``skip`` once, each given the stages before it."""
        for place, (stage, groups) in enumerate(self.stages.items()):
            if stage == skip:
                continue
            moves = self._moves(groups)
            self.moves += moves
            later = (g for g in self.groups if stage_of(g) in STAGES[place + 1 :])
            # In a single sweep, only tensors that a later stage compares need to be
            # moved.
            moved = tensors_of(move.group for move in moves)
            if self.coupled or moved & tensors_of(later):
                self.problem = self.problem.moved(moves)

    def _moves(self, groups: Groups) -> list[Move]:
        """Match groups and record the matches; return the moves that remove enough."""
        matches = match_stage(groups, self.problem)
        candidates = candidates_of(groups, matches, self.problem)
        enough = beyond_chance(candidates, self.problem)
        moves = []
        for candidate, accepted in zip(candidates, enough, strict=True):
            group = candidate.group
            match = candidate.match
            if match.certified is not None and not self.problem.options.coupled:
                self.certified[group.name] = match.certified
            skipped = False
            if accepted and match.element is not None:
                moves.append(Move(group, match.element))
            else:
                match = replace(match, after=match.before)
                skipped = match.gain > 0
            self._note(group, match, candidate.chance, skipped)
        return moves

    def _note(
        self,
        group: Group,
        match: Match,
        chance: float | None = None,
        skipped: bool = False,
    ) -> None:
        """Add a match to the row of its group."""
        row = self.rows.get(group.name)
        if row is None:
            self.first_seen += self._unseen(group, match.before)
            row = GroupReport.unmoved(group, match.before)
        after = row.after - (match.before - match.after)
        self.rows[group.name] = replace(
            row,
            after=after,
            certified=match.certified is not None,
            skipped=skipped,
            found=row.found + match.gain,
            chance=chance,
        )

    def _unseen(
        self,
        group: Group,
        before: float,
    ) -> float:
        """Return the squared distance of the entries that no earlier group acts on."""
        new: list[Slot] = []
        for slot in group.slots:
            shape = self.problem.symmetry.shapes[slot.tensor]
            mask = slot.slice.mask(shape[slot.axis])
            by_axis = self._seen[slot.tensor]
            seen = by_axis.setdefault(slot.axis, torch.zeros_like(mask))
            # All entries of the tensor may have been seen on another axis.
            whole = any(other.all() for other in by_axis.values())
            if whole or (seen & mask).any():
                continue
            new.append(slot)
            seen |= mask
        if not new:
            return 0.0
        if len(new) == len(group.slots):
            return before
        return self.problem.total([replace(group, slots=tuple(new))])

    def solution(
        self,
        before: float,
        after: float,
    ) -> Solution:
        moves = compact(self.moves)
        for move in moves:
            row = replace(self.rows[move.group.name], skipped=False)
            self.rows[move.group.name] = row.moved_by(move.group, move.element)
        rows = tuple(self.rows[group.name] for group in self.groups)
        return Solution(
            moves, AlignmentReport(rows, before, after, 0.0), self.certified
        )


def compact(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Return equivalent moves, one per group; groups within others are last."""
    total: dict[str, Move] = {}
    for move in moves:
        name = move.group.name
        action = move.group.action
        # An order of heads carries the elements inside the heads with it.
        for inner, other in total.items():
            if other.group.within == name:
                total[inner] = replace(
                    other, element=action.act(move.element, other.element, 0)
                )
        if name in total:
            move = replace(
                move, element=action.compose(move.element, total[name].element)
            )
        total[name] = move
    return tuple(sorted(total.values(), key=lambda move: bool(move.group.within)))
