"""The matching problem of one client: ``Anchor``, ``Problem``, and ``Match``, the result per group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedrot.collect.activations import Activations
from fedrot.errors import UpdateError
from fedrot.matching import assignment
from fedrot.matching.chance import Spread, near_share, requirement
from fedrot.matching.pairs import Pair, by_sign, distance_once, pairs, squared_distance
from fedrot.options import AlignmentOptions
from fedrot.symmetry.groups import Group, Symmetry
from fedrot.symmetry.moves import Move, apply_moves
from fedrot.tensors import SMALLEST_NORM, Tensors, check_finite

#: The fields of an anchor that hold what is computed from its tensors.
_OF_TENSORS = ("_separation", "_sizes", "_squares")


@dataclass
class Anchor:
    """An anchor's tensors, with bounds on its neurons' separation that all clients share.

    ``spread`` is its own noise, which decides what chance removes.
    """

    tensors: Tensors
    spread: Spread = field(default_factory=Spread, repr=False)
    _separation: dict[tuple[str, int | None], Tensor] = field(default_factory=dict, repr=False)
    _last: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _sizes: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _moved: dict[str, bool] = field(default_factory=dict, repr=False)
    _squares: dict[str, float] = field(default_factory=dict, repr=False)
    _canonical: dict[str, dict[Any, Any]] = field(default_factory=dict, repr=False)

    def size(self, group: Group) -> float:
        """Return the sum of the squared norms of a group's blocks; computed once.

        Of an anchor that follows the clients (``towards_last``) it is that of the round's first one: it
        decides about near and far alone.
        """
        if group.name not in self._squares:
            blocks = (slot.of(self.tensors[slot.tensor].detach()).float() for slot in group.slots)
            norms = torch.stack([torch.linalg.vector_norm(block) for block in blocks])
            self._squares[group.name] = float(norms.double().square().sum())
        return self._squares[group.name]

    def separation(self, group: Group, columns: int | None) -> Tensor:
        """Return the bound of ``assignment.separation`` for one group; computed once."""
        key = (group.name, columns)
        if key not in self._separation:
            blocks = [a for a, _ in pairs(group, self.tensors, self.tensors)]
            self._separation[key] = assignment.separation(*by_sign(group, blocks), columns)
            self._sizes.setdefault(group.name, assignment.largest(blocks))
        return self._separation[key]

    def note(self, group: Group, distances: Tensor) -> None:
        """Store the squared distances ``[n]`` of a client whose neurons keep their order."""
        self._last[group.name] = distances

    def note_moved(self, moved: Mapping[str, bool]) -> None:
        """Store which groups of the last client are moved."""
        self._moved.update(moved)

    def spread_after(self, share: float) -> Spread:
        """Return the spread of an anchor that goes ``share`` of the way to the last client."""
        return self.spread.towards(share, self._moved)

    def containing(self, share: float, moved: Mapping[str, bool]) -> Anchor:
        """Return this anchor for an update that is ``share`` of it; ``moved`` as for its spread."""
        return replace(self, spread=self.spread.containing(share, moved))

    def in_canonical_form(self, tensors: Tensors) -> Anchor:
        """Return this anchor with its tensors in canonical form, and what is known of them alone."""
        known: dict[str, Any] = {name: self._canonical.setdefault(name, {}) for name in _OF_TENSORS}
        return replace(self, tensors=tensors, **known)

    def forgetful(self) -> Anchor:
        """Return this anchor with notes of its own; the bounds stay shared."""
        return replace(self, _last={}, _moved={})

    def towards_last(self, tensors: Tensors, share: float) -> Anchor:
        """Return an anchor with new tensors, ``share`` (0 to 1) of the way to the last aligned client.

        Each neuron has moved by at most ``share`` times its noted distance. The known bounds on the
        separation stay valid once reduced by the neuron's own movement, by the largest movement, and
        by the rounding error.
        """
        moved = Anchor(tensors, self.spread_after(share), _squares=self._squares)
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
    """The best element of one group, and the group's squared distances to the anchor.

    Attributes:
        element: None for the identity.
        before: squared distance of the group's weights as they came.
        after: squared distance once the element has moved them.
        gain: decrease of the objective, in units of squared distance. It differs from
            ``before - after`` for head permutations, which include the best rotation inside the heads,
            and where activations enter the objective. Where no element gains what is required
            (``Problem.required``), it may be an upper bound, beside the identity.
        certified: True if the identity is proved to be optimal without solving an assignment.
    """

    element: Tensor | None
    before: float
    after: float
    gain: float = 0.0
    certified: bool = False


@dataclass(frozen=True)
class Problem:
    """The tensors of an anchor and of a client, the options, and activations if there are any.

    ``applied`` names the groups whose moves the client's tensors contain.
    """

    anchor: Anchor
    client: Tensors
    symmetry: Symmetry
    options: AlignmentOptions
    activations: Activations | None = None
    applied: frozenset[str] = frozenset()

    @property
    def chance_known(self) -> bool:
        """False where groups depend on each other, or activations have a say."""
        return not self.options.coupled and self.activations is None

    def near_chance(self, group: Group, before: float) -> float | None:
        """Return the squared distance that chance removes from a group, None if no formula tells it."""
        if not self.chance_known:
            return None
        if not group.kind.free:
            return None  # whether chance changes an order or a sign depends on the single units
        anchor = self.anchor
        share = near_share(group, anchor.tensors, anchor.size(group), before, anchor.spread)
        return None if share is None else share * before

    def required(
        self, group: Group, before: float, chance: float | None, quantile: float = math.inf
    ) -> float:
        """Return the squared distance that a group has to remove to be beyond chance.

        Inside a moved head it is nothing: the head's place was chosen for the best element. Without a
        normal scale no element is beyond chance.
        """
        if not self.scaled(group, before):
            return math.inf
        if chance is None or group.within in self.applied:
            return 0.0
        return requirement(group, before, chance, self.options.chance, quantile)

    def least(self, group: Group, before: float, chance: float | None) -> float:
        """Return a lower bound of what is required, for groups that need not be solved exactly."""
        needed = self.required(group, before, chance)
        times = 0.0 if chance is None else self.options.chance * chance
        return needed if needed == math.inf else min(needed, times)

    def scaled(self, group: Group, before: float) -> bool:
        """Return whether anchor and client can be compared: their blocks are not 0 or denormal.

        Products of smaller numbers vanish in float32, so that the best element would be rounding.
        """
        if before <= self.anchor.size(group) / 4:
            return True  # neither can be 0
        blocks = (torch.stack([torch.linalg.vector_norm(t) for t in pair]) for pair in self.pairs(group))
        return float(torch.stack(list(blocks)).amax(0).min()) >= SMALLEST_NORM

    def moved(self, moves: Sequence[Move]) -> Problem:
        """Return the problem with the moves applied to the client."""
        activations = None if self.activations is None else self.activations.moved(moves)
        applied = self.applied.union(move.group.name for move in moves)
        client = apply_moves(self.client, moves)
        return replace(self, client=client, activations=activations, applied=applied)

    def pairs(self, group: Group) -> list[Pair]:
        """Return the pairs of all slots of a group."""
        return pairs(group, self.anchor.tensors, self.client)

    def distance(self, group: Group, blocks: Sequence[Pair]) -> float:
        """Return the squared distance of a group's pairs; raise ``UpdateError`` if it is not finite."""
        return self.finite(squared_distance(blocks), group)

    def finite(self, value: float, group: Group) -> float:
        """Return a group's squared distance; raise ``UpdateError`` if it is not finite."""
        if not math.isfinite(value):
            for tensors in (self.client, self.anchor.tensors):
                check_finite({slot.tensor: tensors[slot.tensor] for slot in group.slots})
            raise UpdateError(
                f"The squared distance to the anchor overflows in group '{group.name}': its values are "
                "too large for float32. Check the client's training."
            )
        return value

    def evidence(
        self, group: Group, blocks: Sequence[Pair] | None = None
    ) -> tuple[float, Tensor | None]:
        """Return the factor of the weights' similarity, and the activations' term to add to it.

        ``blocks`` are the group's pairs, if the caller has them.
        Both are in units of squared distance. With ``w = options.activation_weight``, a group's
        activations count ``w / (1 - w)`` times its weights; with ``w = 1`` the weights' factor is 0.
        """
        weight = self.options.activation_weight
        cross = None if self.activations is None else self.activations.cross(group)
        if cross is None or weight == 0:
            return 1.0, None
        blocks = self.pairs(group) if blocks is None else blocks
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
        """Return what the solvers minimise: squared distance minus twice the activations' traces."""
        only_activations = self.activations is not None and self.options.activation_weight == 1
        value = 0.0 if only_activations else self.total(groups)
        for group in groups:
            _, addition = self.evidence(group)
            value -= 0.0 if addition is None else 2 * float(addition.trace())
        return value
