"""Matches of a stage beside what chance removes, and which of them remove more."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor

from fedrot.matching.chance import (
    beyond,
    chance_known,
    line_of,
    near_chance,
    null_models,
    quantile_of_null,
    threshold_of,
)
from fedrot.matching.problem import (
    Groups,
    Match,
    Problem,
    in_batches,
    match_stage,
    tensors_of,
)
from fedrot.symmetry.groups import Group


@dataclass(frozen=True)
class MatchCandidate:
    """A group's match beside the squared distance that chance removes.

    Attributes:
        chance: the mean of this distance; None if it is unknown.
        quantile: a distance that chance hardly ever removes.
    """

    group: Group
    match: Match
    chance: float | None = None
    quantile: float = math.inf


def candidates_of(
    groups: Groups,
    matches: Sequence[Match],
    problem: Problem,
) -> list[MatchCandidate]:
    """Return the matches of groups beside the distances that chance removes.

    Without a formula, null models are drawn for groups with an element, unless
    ``chance`` is 0.
    """
    known = chance_known(problem)
    candidates = []
    for group, match in zip(groups, matches, strict=True):
        chance = near_chance(problem, group, match.before)
        # Chance of a group that does not move is not needed: no model is drawn, and the
        # threshold 0 decides nothing.
        if known and chance is None and match.element is None:
            chance = 0.0
        candidates.append(MatchCandidate(group, match, chance))
    if not known or problem.options.chance == 0:
        return candidates
    far = {c.group.name: c for c in candidates if c.chance is None}
    for batch in without_common_tensors(c.group for c in far.values()):
        far.update(_drawn([far[group.name] for group in batch], problem))
    return [far.get(candidate.group.name, candidate) for candidate in candidates]


def _drawn(
    far: Sequence[MatchCandidate],
    problem: Problem,
) -> dict[str, MatchCandidate]:
    """Return candidates with chance by null models, by group.

    The groups share no tensor.
    """
    anchor = problem.anchor.tensors
    groups = [candidate.group for candidate in far]
    lines = {group: line_of(group, anchor, problem.client) for group in groups}
    options = replace(problem.options, chance=0.0)
    draws = []
    for null in null_models(lines, anchor, problem.client):
        drawn = replace(problem, client=null, options=options)
        draws.append([match.gain for match in match_stage(groups, drawn)])
    containers = {group.within for group in problem.symmetry.groups}
    candidates = {}
    for candidate, gains in zip(far, zip(*draws, strict=True), strict=True):
        group = candidate.group
        mean = statistics.fmean(gains)
        most = quantile_of_null(
            group,
            anchor,
            cast(Tensor, candidate.match.element),
            lines[group],
            mean,
            inner=group.name in containers,
        )
        candidates[group.name] = MatchCandidate(group, candidate.match, mean, most)
    return candidates


def without_common_tensors(groups: Iterable[Group]) -> list[list[Group]]:
    """Return the groups in lists; no two groups of a list act on the same tensor."""
    batches: list[list[Group]] = []
    for group in groups:
        tensors = tensors_of([group])
        for batch in batches:
            if not tensors & tensors_of(batch):
                batch.append(group)
                break
        else:
            batches.append([group])
    return batches


def beyond_chance(
    candidates: Sequence[MatchCandidate],
    problem: Problem,
) -> list[bool]:
    """Return whether each group removes enough.

    Groups of one action are judged together.
    """

    def judge(members: Sequence[MatchCandidate]) -> list[bool]:
        gains = []
        thresholds = []
        for member in members:
            match = member.match
            gains.append(match.gain)
            thresholds.append(
                threshold_of(
                    problem,
                    member.group,
                    match.before,
                    member.chance,
                    member.quantile,
                )
            )
        return beyond(gains, thresholds)

    return in_batches(candidates, lambda member: type(member.group.action), judge)
