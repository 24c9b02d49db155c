"""Coordinate descent: sweeps over all stages, each solved exactly given the others.

Source: Ainsworth et al. 2023 (Git Re-Basin), Algorithm 1, extended from permutations of
neurons to heads, rotations, signs and the residual stream.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
from fedrot.matching.problem import (
    COUPLED,
    STAGES,
    Match,
    Problem,
    distance_once,
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
    """The best moves found, one per moved group in the order of application, and their
    report.

    The report's ``seconds`` are 0. ``certified`` is ``Match.certified`` by group name;
    empty if groups depend on each other.
    """

    moves: tuple[Move, ...]
    report: AlignmentReport
    certified: Tensors


def solve(problem: Problem, groups: Sequence[Group]) -> Solution:
    """Return the best moves found for the groups, and their report.

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
class _Chance:
    """The distance that chance removes from a group: its mean, None if unknown, and its
    quantile.
    """

    mean: float | None
    quantile: float = math.inf


def _coupled(groups: Sequence[Group]) -> bool:
    """Return whether groups depend on each other, so that one sweep is not enough.

    Groups are independent if no tensor lies on two slots, even in parts that usually
    share tensors.
    """
    tensors = [slot.tensor for group in groups for slot in group.slots]
    return any(group.part in COUPLED for group in groups) and len(set(tensors)) < len(
        tensors
    )


class _Descent:
    """One run of coordinate descent: the problem after the moves so far, the moves, and
    the rows.
    """

    def __init__(self, problem: Problem, groups: Sequence[Group]) -> None:
        self.problem = problem
        self.groups = groups
        for group in groups:
            solver_of(group)
        self.stages = {
            stage: tuple(g for g in groups if stage_of(g) == stage) for stage in STAGES
        }
        self.coupled = _coupled(groups)
        self.moves: list[Move] = []
        self.rows: dict[str, GroupReport] = {}
        self.certified: dict[str, Tensor] = {}
        self.first_seen = 0.0
        self._seen = dict[tuple[str, int], Tensor]()

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
        elsewhere = _tensors(
            group for group in self.groups if stage_of(group) != "residual"
        )
        for group in self.stages["residual"]:
            alone = tuple(slot for slot in group.slots if slot.tensor not in elsewhere)
            reduced = replace(group, slots=alone)
            element = match_stage([reduced], self.problem)[0].element if alone else None
            if element is None:
                continue
            moved = self.problem.moved([Move(group, element)])
            before, after = self.problem.total([group]), moved.total([group])
            gain = self.problem.objective([group]) - moved.objective([group])
            if gain > 0:
                self.moves.append(Move(group, element))
                self.problem = moved
                self._note(group, before, after)
        return bool(self.moves)

    def sweep(self, skip: str = "") -> None:
        """Run every stage except ``skip`` once, each given the stages before it."""
        for place, (stage, groups) in enumerate(self.stages.items()):
            if stage == skip:
                continue
            matches = match_stage(groups, self.problem)
            chances = self._chances(groups, matches)
            enough = self._beyond(groups, matches, chances)
            found = [
                move
                for group, match, chance in zip(groups, matches, chances, strict=True)
                if (
                    move := self._accepted(
                        group, match, chance.mean, group.name in enough
                    )
                )
                is not None
            ]
            self.moves += found
            later = (
                group
                for groups in [*self.stages.values()][place + 1 :]
                for group in groups
            )
            # In a single sweep, only tensors that a later stage compares need to be
            # moved.
            if self.coupled or _tensors(m.group for m in found) & _tensors(later):
                self.problem = self.problem.moved(found)

    def _chances(
        self, groups: Sequence[Group], matches: Sequence[Match]
    ) -> list[_Chance]:
        """Return the distance that chance removes from each group.

        Without a formula, null models are drawn for groups with an element, unless
        ``chance`` is 0.
        """
        problem = self.problem
        if not chance_known(problem):
            return [_Chance(None)] * len(groups)
        asked, found, far = (
            problem.options.chance > 0,
            list[_Chance](),
            dict[Group, Tensor](),
        )
        for group, match in zip(groups, matches, strict=True):
            near = near_chance(problem, group, match.before)
            found.append(
                _Chance(0.0 if near is None and match.element is None else near)
            )
            if near is None and match.element is not None and asked:
                far[group] = match.element
        drawn = self._drawn(far)
        return [
            drawn.get(group.name, chance)
            for group, chance in zip(groups, found, strict=True)
        ]

    def _drawn(self, elements: Mapping[Group, Tensor]) -> dict[str, _Chance]:
        """Return chance by null models for each group, given the best elements
        found.
        """
        anchor, client = self.problem.anchor, self.problem.client
        options = replace(self.problem.options, chance=0.0)
        drawn: dict[str, _Chance] = {}
        for batch in without_common_tensors(elements):
            lines = {group: line_of(group, anchor.tensors, client) for group in batch}
            gains: dict[str, list[float]] = {group.name: [] for group in batch}
            for null in null_models(lines, anchor.tensors, client):
                problem = replace(self.problem, client=null, options=options)
                for group, match in zip(
                    batch, match_stage(batch, problem), strict=True
                ):
                    gains[group.name].append(match.gain)
            for group, line in lines.items():
                inner = any(
                    other.within == group.name for other in self.problem.symmetry.groups
                )
                mean = statistics.fmean(gains[group.name])
                most = quantile(
                    group, anchor.tensors, elements[group], line, mean, inner
                )
                drawn[group.name] = _Chance(mean, most)
        return drawn

    def _beyond(
        self,
        groups: Sequence[Group],
        matches: Sequence[Match],
        chances: Sequence[_Chance],
    ) -> set[str]:
        """Return the names of the groups that remove enough; one action is judged
        together.
        """
        by_action: dict[type, list[tuple[str, float, float]]] = {}
        for group, match, chance in zip(groups, matches, chances, strict=True):
            needed = required(
                self.problem, group, match.before, chance.mean, chance.quantile
            )
            by_action.setdefault(type(group.action), []).append(
                (group.name, match.gain, needed)
            )
        names: set[str] = set()
        for rows in by_action.values():
            own, gains, needs = zip(*rows, strict=True)
            names |= {
                name for name, ok in zip(own, beyond(gains, needs), strict=True) if ok
            }
        return names

    def _accepted(
        self, group: Group, match: Match, chance: float | None, enough: bool
    ) -> Move | None:
        """Record a match; return its move if the group removes enough."""
        element = match.element if enough else None
        skipped = element is None and match.gain > 0
        after = match.before if element is None else match.after
        self._note(group, match.before, after, match.certified is not None, skipped)
        if match.certified is not None and not self.problem.options.coupled:
            self.certified[group.name] = match.certified
        row = self.rows[group.name]
        self.rows[group.name] = replace(
            row, found=row.found + match.gain, chance=chance
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

    def _unseen(self, group: Group, before: float) -> float:
        """Return the squared distance of the entries that no earlier group acts on."""
        new: list[Slot] = []
        for slot in group.slots:
            shape = self.problem.symmetry.shapes[slot.tensor]
            mask = slot.slice.mask(shape[slot.axis])
            seen = self._seen.setdefault(
                (slot.tensor, slot.axis), torch.zeros_like(mask)
            )
            # All entries of the tensor may have been seen on another axis.
            masks = (
                other for (name, _), other in self._seen.items() if name == slot.tensor
            )
            if bool((seen & mask).any()) or any(bool(other.all()) for other in masks):
                continue
            new.append(slot)
            seen |= mask
        if len(new) == len(group.slots) or not new:
            return before if new else 0.0
        return distance_once(new, self.problem.anchor.tensors, self.problem.client)

    def solution(self, before: float, after: float) -> Solution:
        moves = compact(self.moves)
        elements = {move.group.name: move.element for move in moves}
        rows = []
        for group in self.groups:
            row, element = self.rows[group.name], elements.get(group.name)
            if element is not None:
                row = replace(row, skipped=False).moved_by(group, element)
            rows.append(row)
        return Solution(
            moves, AlignmentReport(tuple(rows), before, after, 0.0), self.certified
        )


def compact(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Return equivalent moves, one per group; groups that lie within others are
    last.
    """
    total: dict[str, Move] = {}
    for move in moves:
        name, action = move.group.name, move.group.action
        for other in [m for m in total.values() if m.group.within == name]:
            carried = action.act(move.element, other.element, 0)
            total[other.group.name] = replace(other, element=carried)
        earlier = total.get(name)
        element = (
            move.element
            if earlier is None
            else action.compose(move.element, earlier.element)
        )
        total[name] = replace(move, element=element)
    return tuple(sorted(total.values(), key=lambda move: bool(move.group.within)))


def _tensors(groups: Iterable[Group]) -> set[str]:
    return {slot.tensor for group in groups for slot in group.slots}
