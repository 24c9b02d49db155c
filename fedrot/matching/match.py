"""One matcher per part: from groups, an anchor and an update to the best elements."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.matching import permutation, rotation
from fedrot.matching.blocks import Pair, pairs, squared_distance
from fedrot.matching.heads import head_scores
from fedrot.matching.rescale import best_scale, head_products
from fedrot.options import AlignmentOptions
from fedrot.symmetry.description import Group, Symmetry
from fedrot.symmetry.kinds import HeadPermutation, HeadRotation, Rescale
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

    ``gain`` is what the element is worth once the stages after it have run; it differs from
    ``before - after`` only for heads, whose permutation is chosen for the rotation that follows.
    """

    element: Tensor | None
    before: float
    after: float
    gain: float = 0.0
    angle: float = 0.0
    certified: bool = False


Matcher = Callable[[tuple[Group, ...], Anchor, Tensors, Symmetry, AlignmentOptions], list[Match]]


def match_heads(
    groups: tuple[Group, ...],
    anchor: Anchor,
    client: Tensors,
    symmetry: Symmetry,
    options: AlignmentOptions,
) -> list[Match]:
    """Assign heads by the cost that remains after their rotation, if rotations are to follow."""
    matches = []
    for group in groups:
        inner = symmetry.select(options.parts, (group.layer,))
        rotated = {s: g.name for g in inner if g.within == group.name for s in g.slots}
        blocks = pairs(group, anchor.tensors, client)
        before = after = distance(group, blocks, anchor, client)
        slots = zip(blocks, (rotated.get(slot) for slot in group.slots), strict=True)
        scores = head_scores(cast(HeadPermutation, group.kind).n, slots, options.ridge)
        element, gain = permutation.best_assignment(scores)
        if element is not None:
            after = squared_distance([(a, group.kind.act(element, c, 0)) for a, c in blocks])
        matches.append(Match(element, before, after, gain))
    return matches


def match_rotations(
    groups: tuple[Group, ...],
    anchor: Anchor,
    client: Tensors,
    symmetry: Symmetry,
    options: AlignmentOptions,
) -> list[Match]:
    """Solve Procrustes for all heads of all layers of one shape in one batch."""
    batches: dict[HeadRotation, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        batches[cast(HeadRotation, group.kind)].append(index)
    matches: dict[int, Match] = {}
    for kind, indices in batches.items():
        crosses, before = [], []
        for index in indices:
            blocks = pairs(groups[index], anchor.tensors, client)
            before.append(distance(groups[index], blocks, anchor, client))
            crosses.append(rotation.similarity(kind, blocks))
        cross = torch.stack(crosses)
        precise = blocks[0][1].dtype == torch.float64
        best = rotation.polar(cross, options.ridge, precise=precise)
        for i, (index, gain) in enumerate(zip(indices, rotation.gain(best, cross), strict=True)):
            if gain is None:
                matches[index] = Match(None, before[i], before[i])
            else:
                after = max(before[i] - gain, 0.0)
                angle = rotation.mean_angle(best[i])
                matches[index] = Match(best[i], before[i], after, gain, angle)
    return [matches[index] for index in range(len(groups))]


def match_scales(
    groups: tuple[Group, ...],
    anchor: Anchor,
    client: Tensors,
    symmetry: Symmetry,
    options: AlignmentOptions,
) -> list[Match]:
    """Solve the quartic of each head."""
    matches = []
    for group in groups:
        blocks = pairs(group, anchor.tensors, client)
        before = distance(group, blocks, anchor, client)
        sides = [slot.contravariant for slot in group.slots]
        heads = cast(Rescale, group.kind).heads
        element, gains = best_scale(*head_products(heads, blocks, sides))
        gain = float(gains.sum())
        after = max(before - gain, 0.0)
        matches.append(Match(element if gain > 0 else None, before, after, gain))
    return matches


def match_neurons(
    groups: tuple[Group, ...],
    anchor: Anchor,
    client: Tensors,
    symmetry: Symmetry,
    options: AlignmentOptions,
) -> list[Match]:
    """Certify the identity from distances alone where possible, else solve the assignment."""
    matches = []
    for group in groups:
        blocks = pairs(group, anchor.tensors, client)
        distances = permutation.row_distances(blocks)
        before = _finite(float(distances.sum()), group, anchor, client)
        if permutation.identity_certified(distances, partial(anchor.separation, group)):
            matches.append(Match(None, before, before, certified=True))
            continue
        element, gain = permutation.assignment(blocks)
        matches.append(Match(element, before, max(before - gain, 0.0), gain))
    return matches


def distance(group: Group, blocks: Sequence[Pair], anchor: Anchor, client: Tensors) -> float:
    """Return the group's squared distance; raise ``UpdateError`` where it is not finite."""
    return _finite(squared_distance(blocks), group, anchor, client)


def _finite(value: float, group: Group, anchor: Anchor, client: Tensors) -> float:
    if not math.isfinite(value):
        for tensors in (client, anchor.tensors):
            check_finite({slot.tensor: tensors[slot.tensor] for slot in group.slots})
        raise UpdateError(
            f"The squared distance to the anchor overflows in group '{group.name}': its values are "
            "too large for float32. Check the client's training."
        )
    return value


#: The matcher of each part, in the order in which the stages run.
STAGES: dict[str, Matcher] = {
    "heads": match_heads,
    "attention": match_rotations,
    "rescale": match_scales,
    "ffn": match_neurons,
}
