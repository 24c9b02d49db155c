"""Coordinate descent over the parts: every stage exact given the others, repeated while it pays.

Source: Ainsworth et al. 2023 (Git Re-Basin), Algorithm 1, extended from permutations of neurons to
heads, rotations, signs and the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from fedrot.matching.pairs import distance_once
from fedrot.matching.stages import COUPLED, STAGES, Match, Problem, stage_of
from fedrot.report import GroupReport, as_bits
from fedrot.symmetry.groups import Group, Slot
from fedrot.transport import Move


@dataclass(frozen=True)
class Solution:
    """The moves, one per group that moves, in the order in which they are applied, and the report."""

    moves: tuple[Move, ...]
    rows: tuple[GroupReport, ...]
    before: float
    after: float


def solve(problem: Problem, groups: Sequence[Group]) -> Solution:
    """Return the best moves that were found for the groups."""
    if not any(group.part in COUPLED for group in groups):
        descent = _Descent(problem, groups)
        descent.sweep()
        before = descent.first_seen
        removed = sum(row.before - row.after for row in descent.rows.values())
        return descent.solution(before, max(before - removed, 0.0))
    best = min(
        (_Descent(problem, groups).run(start) for start in range(1 + problem.options.restarts)),
        key=lambda descent: descent.objective,
    )
    return best.solution(problem.total(groups), best.problem.total(groups))


class _Descent:
    """One run of coordinate descent: what remains of the problem, and what was moved so far."""

    def __init__(self, problem: Problem, groups: Sequence[Group]) -> None:
        self.problem = problem
        self.groups = groups
        self.stages = {stage: tuple(g for g in groups if stage_of(g) == stage) for stage in STAGES}
        self.coupled = any(group.part in COUPLED for group in groups)
        self.moves: list[Move] = []
        self.rows: dict[str, GroupReport] = {}
        self.objective = float("inf")
        self.first_seen = 0.0
        self._seen = dict[tuple[str, int], Tensor]()

    def run(self, start: int) -> _Descent:
        """Sweep until the objective falls by less than the tolerance."""
        options = self.problem.options
        started = self._start(start)
        self.objective = self.problem.objective(self.groups)
        if started:
            # The parts inside the layers first: matched to them, the stream keeps what the start found.
            self.sweep(skip="residual")
        for _ in range(options.sweeps):
            before = self.objective
            self.sweep()
            self.objective = self.problem.objective(self.groups)
            if before - self.objective < options.tolerance * abs(before):
                break
        return self

    def _start(self, seed: int) -> bool:
        """Bring the residual stream near its place before the parts inside the layers are known.

        Seed 0 looks only at activations and at tensors that no other part moves (embeddings, norms,
        biases), and moves only what comes nearer; other seeds draw a random order. Returns whether
        anything was moved.
        """
        generator = torch.Generator().manual_seed(seed)
        others = (g for part, groups in self.stages.items() if part != "residual" for g in groups)
        elsewhere = _tensors(others)
        for group in self.stages["residual"]:
            if seed:
                place = self.problem.client[group.slots[0].tensor].device
                element: Tensor | None = group.kind.random(generator).to(place)
            else:
                alone = tuple(slot for slot in group.slots if slot.tensor not in elsewhere)
                reduced = (replace(group, slots=alone),) if alone else ()
                matches = STAGES["residual"](reduced, self.problem)
                element = matches[0].element if matches else None
            if element is None:
                continue
            moved = self.problem.moved([Move(group, element)])
            before, after = self.problem.total([group]), moved.total([group])
            gain = self.problem.objective([group]) - moved.objective([group])
            if seed or gain > self.problem.options.threshold * before:
                self.moves.append(Move(group, element))
                self.problem = moved
                self._note(group, before, after)
        return bool(self.moves)

    def sweep(self, skip: str = "") -> None:
        """Run every stage but ``skip`` once, each given the ones before it."""
        later = list(self.stages.values())
        for part, match in STAGES.items():
            stage = later.pop(0)
            if part == skip:
                continue
            found = [
                move
                for group, result in zip(stage, match(stage, self.problem), strict=True)
                if (move := self._accepted(group, result)) is not None
            ]
            # Without further sweeps, what no later stage looks at need not be moved.
            if self.coupled or _tensors(m.group for m in found) & _tensors(chain(*later)):
                self._move(found)
            else:
                self.moves += found

    def _move(self, moves: list[Move]) -> None:
        self.moves += moves
        self.problem = self.problem.moved(moves)

    def _accepted(self, group: Group, match: Match) -> Move | None:
        """Note a match, and return its move unless it gains less than the threshold."""
        # A permuted head keeps its rotation: the permutation was chosen for what follows it.
        bound = any(move.group.name == group.within for move in self.moves)
        threshold = self.problem.options.threshold
        skipped = match.element is not None and not bound and match.gain < threshold * match.before
        element = None if skipped else match.element
        after = match.before if element is None else match.after
        self._note(group, match.before, after, match.certified, skipped)
        return None if element is None else Move(group, element)

    def _note(
        self, group: Group, before: float, after: float, certified: bool = False, skipped: bool = False
    ) -> None:
        row = self.rows.get(group.name)
        if row is None:
            self.first_seen += self._unseen(group, before)
            row = GroupReport(
                group=group.name,
                layer=group.layer,
                part=group.part,
                before=before,
                after=before,
                units=0,
                of=group.kind.units,
                within=group.within,
            )
        self.rows[group.name] = replace(
            row, after=row.after - (before - after), certified=certified, skipped=skipped
        )

    def _unseen(self, group: Group, before: float) -> float:
        """Return the squared distance of the entries that no group before this one acts on."""
        new: list[Slot] = []
        for slot in group.slots:
            shape = self.problem.symmetry.shapes[slot.tensor]
            mask = slot.slice.mask(shape[slot.axis])
            seen = self._seen.setdefault((slot.tensor, slot.axis), torch.zeros_like(mask))
            if bool((seen & mask).any()) or self._covered(slot):
                continue
            new.append(slot)
            seen |= mask
        if len(new) == len(group.slots) or not new:
            return before if new else 0.0
        return distance_once(new, self.problem.anchor.tensors, self.problem.client)

    def _covered(self, slot: Slot) -> bool:
        """Whether all entries of a slot's tensor were seen on another axis."""
        seen = (mask for (name, _), mask in self._seen.items() if name == slot.tensor)
        return any(bool(mask.all()) for mask in seen)

    def solution(self, before: float, after: float) -> Solution:
        """Return what was found, with the distances before and after."""
        moves = compact(self.moves)
        elements = {move.group.name: move.element for move in moves}
        rows = []
        for group in self.groups:
            row, element = self.rows[group.name], elements.get(group.name)
            if element is not None:
                moved, angle = group.kind.moved(element), group.kind.angle(element)
                row = replace(row, units=as_bits(moved), angle=angle, skipped=False)
            rows.append(row)
        return Solution(moves, tuple(rows), before, after)


def compact(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Return the same motion with one move per group, head permutations before what is inside heads."""
    total: dict[str, Move] = {}
    for move in moves:
        name, kind = move.group.name, move.group.kind
        for other in [m for m in total.values() if m.group.within == name]:
            carried = kind.act(move.element, other.element, 0)
            total[other.group.name] = replace(other, element=carried)
        earlier = total.get(name)
        element = move.element if earlier is None else kind.compose(move.element, earlier.element)
        total[name] = replace(move, element=element)
    return tuple(sorted(total.values(), key=lambda move: bool(move.group.within)))


def _tensors(groups: Iterable[Group]) -> set[str]:
    return {slot.tensor for group in groups for slot in group.slots}
