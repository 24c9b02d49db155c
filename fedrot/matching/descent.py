"""Coordinate descent: sweeps over all stages, each solved exactly given the others.

Source: Ainsworth et al. 2023 (Git Re-Basin), Algorithm 1, extended from permutations of
neurons to heads, rotations, signs and the residual stream.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import cast

import torch
from torch import Tensor

from fedrot.matching.chance import (
    beyond,
    chance_known,
    line_of,
    near_chance,
    null_models,
    quantile,
    required,
    without_common_tensors,
)
from fedrot.matching.pairs import Masks, distance_once
from fedrot.matching.problem import (
    COUPLED,
    STAGES,
    Groups,
    Match,
    Problem,
    match_stage,
    solver_of,
    stage_of,
)
from fedrot.report import AlignmentReport, GroupReport
from fedrot.symmetry.groups import Group, Move, Slot
from fedrot.tensors import Tensors

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
    if not _coupled(groups):
        descent.sweep()
        before = descent.first_seen
        removed = sum(row.before - row.after for row in descent.rows.values())
        return descent.solution(before, max(before - removed, 0.0))
    descent.run()
    return descent.solution(problem.total(groups), descent.problem.total(groups))


@dataclass(frozen=True)
class _Candidate:
    """A group's match beside the squared distance that chance removes.

    Attributes:
        chance: the mean of this distance; None if it is unknown.
        quantile: a distance that chance hardly ever removes.
    """

    group: Group
    match: Match
    chance: float | None = None
    quantile: float = math.inf


def _coupled(groups: Groups) -> bool:
    """Return whether groups depend on each other, so that one sweep is not enough.

    Groups are independent if no tensor lies on two slots, even in parts that usually
    share tensors.
    """
    if not any(group.part in COUPLED for group in groups):
        return False
    slots = sum(len(group.slots) for group in groups)
    return len(_tensors(groups)) < slots


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
        self.coupled = _coupled(groups)
        self.moves: list[Move] = []
        self.rows: dict[str, GroupReport] = {}
        self.certified: dict[str, Tensor] = {}
        self.first_seen = 0.0
        #: The entries that groups act on.
        self._seen: Masks = defaultdict(dict)

    def run(self) -> None:
        """Sweep until the objective falls by less than the tolerance."""
        started = self._start()
        objective = self.problem.objective(self.groups)
        if started:
            # Match the layers in the new order of the stream before the stream is
            # matched again.
            self.sweep(skip="residual")
        for _ in range(SWEEPS):
            before = objective
            self.sweep()
            objective = self.problem.objective(self.groups)
            if before - objective < TOLERANCE * abs(before):
                break

    def _start(self) -> bool:
        """Choose a first element of the residual stream; return whether anything was
        moved.

        This element matches activations and the tensors that no other stage moves
        (embeddings, norms, biases). It is kept if the objective falls.
        """
        residual = self.stages["residual"]
        elsewhere = _tensors(group for group in self.groups if group not in residual)
        for group in residual:
            alone = tuple(slot for slot in group.slots if slot.tensor not in elsewhere)
            if not alone:
                continue
            (match,) = match_stage([replace(group, slots=alone)], self.problem)
            if match.element is None:
                continue
            move = Move(group, match.element)
            moved = self.problem.moved([move])
            gain = self.problem.objective([group]) - moved.objective([group])
            if gain > 0:
                self._note(group, self.problem.total([group]), moved.total([group]))
                self.moves.append(move)
                self.problem = moved
        return bool(self.moves)

    def sweep(self, skip: str = "") -> None:
        """Run every stage except ``skip`` once, each given the stages before it."""
        for place, (stage, groups) in enumerate(self.stages.items()):
            if stage == skip:
                continue
            candidates = self._candidates(groups)
            enough = self._beyond(candidates)
            moves = []
            for candidate in candidates:
                move = self._accepted(candidate, candidate.group.name in enough)
                if move is not None:
                    moves.append(move)
            self.moves += moves
            later = (g for g in self.groups if stage_of(g) in STAGES[place + 1 :])
            # In a single sweep, only tensors that a later stage compares need to be
            # moved.
            if self.coupled or _tensors(m.group for m in moves) & _tensors(later):
                self.problem = self.problem.moved(moves)

    def _candidates(self, groups: Groups) -> list[_Candidate]:
        """Return the matches of groups, and the distances that chance removes.

        Without a formula, null models are drawn for groups with an element, unless
        ``chance`` is 0.
        """
        problem = self.problem
        matches = match_stage(groups, problem)
        candidates = list(map(_Candidate, groups, matches))
        if not chance_known(problem):
            return candidates
        for i, (group, match) in enumerate(zip(groups, matches, strict=True)):
            chance = near_chance(problem, group, match.before)
            # Chance of a group that does not move is not needed: no model is drawn.
            if chance is None and match.element is None:
                chance = 0.0
            candidates[i] = _Candidate(group, match, chance)
        if problem.options.chance == 0:
            return candidates
        far = [candidate for candidate in candidates if candidate.chance is None]
        drawn = self._drawn(far)
        return [drawn.get(candidate.group.name, candidate) for candidate in candidates]

    def _drawn(self, far: Sequence[_Candidate]) -> dict[str, _Candidate]:
        """Return candidates with chance by null models, by group."""
        anchor = self.problem.anchor.tensors
        client = self.problem.client
        options = replace(self.problem.options, chance=0.0)
        by_name = {candidate.group.name: candidate for candidate in far}
        containers = {group.within for group in self.problem.symmetry.groups}
        for batch in without_common_tensors(candidate.group for candidate in far):
            lines = {group: line_of(group, anchor, client) for group in batch}
            gains: dict[str, list[float]] = defaultdict(list)
            for null in null_models(lines, anchor, client):
                problem = replace(self.problem, client=null, options=options)
                matches = match_stage(batch, problem)
                for group, match in zip(batch, matches, strict=True):
                    gains[group.name].append(match.gain)
            for group, line in lines.items():
                candidate = by_name[group.name]
                mean = statistics.fmean(gains[group.name])
                most = quantile(
                    group,
                    anchor,
                    cast(Tensor, candidate.match.element),
                    line,
                    mean,
                    inner=group.name in containers,
                )
                by_name[group.name] = _Candidate(group, candidate.match, mean, most)
        return by_name

    def _beyond(self, candidates: Sequence[_Candidate]) -> set[str]:
        """Return the names of the groups that remove enough.

        Groups of one action are judged together.
        """
        by_action: dict[type, list[_Candidate]] = defaultdict(list)
        for candidate in candidates:
            by_action[type(candidate.group.action)].append(candidate)
        names: set[str] = set()
        for members in by_action.values():
            gains = []
            needs = []
            for row in members:
                needed = required(
                    self.problem,
                    row.group,
                    row.match.before,
                    row.chance,
                    row.quantile,
                )
                gains.append(row.match.gain)
                needs.append(needed)
            enough = compress(members, beyond(gains, needs))
            names.update(row.group.name for row in enough)
        return names

    def _accepted(
        self,
        candidate: _Candidate,
        enough: bool,
    ) -> Move | None:
        """Record a match; return its move if the group removes enough."""
        group = candidate.group
        match = candidate.match
        element = match.element if enough else None
        skipped = element is None and match.gain > 0
        after = match.before if element is None else match.after
        certified = match.certified is not None
        self._note(
            group,
            match.before,
            after,
            certified,
            skipped,
        )
        if match.certified is not None and not self.problem.options.coupled:
            self.certified[group.name] = match.certified
        row = self.rows[group.name]
        self.rows[group.name] = replace(
            row,
            found=row.found + match.gain,
            chance=candidate.chance,
        )
        return None if element is None else Move(group, element)

    def _note(
        self,
        group: Group,
        before: float,
        after: float,
        certified: bool = False,
        skipped: bool = False,
    ) -> None:
        row = self.rows.get(group.name)
        if row is None:
            self.first_seen += self._unseen(group, before)
            row = GroupReport.unmoved(group, before)
        self.rows[group.name] = replace(
            row,
            after=row.after - (before - after),
            certified=certified,
            skipped=skipped,
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
            whole = any(bool(other.all()) for other in by_axis.values())
            if whole or bool((seen & mask).any()):
                continue
            new.append(slot)
            seen |= mask
        if not new:
            return 0.0
        if len(new) == len(group.slots):
            return before
        return distance_once(new, self.problem.anchor.tensors, self.problem.client)

    def solution(
        self,
        before: float,
        after: float,
    ) -> Solution:
        moves = compact(self.moves)
        elements = {move.group.name: move.element for move in moves}
        rows = []
        for group in self.groups:
            row = self.rows[group.name]
            element = elements.get(group.name)
            if element is not None:
                row = replace(row, skipped=False).moved_by(group, element)
            rows.append(row)
        report = AlignmentReport(tuple(rows), before, after, 0.0)
        return Solution(moves, report, self.certified)


def compact(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Return equivalent moves, one per group; groups within others are last."""
    total: dict[str, Move] = {}
    for move in moves:
        name = move.group.name
        action = move.group.action
        # An order of heads carries the elements inside the heads with it.
        for inner, other in total.items():
            if other.group.within == name:
                carried = action.act(move.element, other.element, 0)
                total[inner] = replace(other, element=carried)
        if name in total:
            element = action.compose(move.element, total[name].element)
            move = replace(move, element=element)
        total[name] = move
    return tuple(sorted(total.values(), key=lambda move: bool(move.group.within)))


def _tensors(groups: Iterable[Group]) -> set[str]:
    return {slot.tensor for group in groups for slot in group.slots}
