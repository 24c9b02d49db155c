"""``Anchor``: a model that updates are aligned to, its noise, and its stored bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedrot.matching.assignment import SLACK, largest, separation
from fedrot.matching.pairs import by_sign, pairs
from fedrot.symmetry.groups import Group
from fedrot.tensors import TensorDict, Tensors


@dataclass(frozen=True)
class Spread:
    """The variance of an anchor's noise, in units of an update's.

    The broadcast model has the variance 0, a mean of ``k`` updates ``1 / k``. If
    updates were aligned to each other, they agree along the directions in which groups
    move, and the variance is larger there.

    Attributes:
        across: the variance of the anchor's entries.
        along: by group, the variance in the directions in which the group moves;
            ``across`` if absent.
    """

    across: float = 0.0
    along: Mapping[str, float] = field(default_factory=dict)

    def towards(
        self,
        share: float,
        moved: Mapping[str, bool],
    ) -> Spread:
        """Return the spread of an anchor that goes ``share`` of the way to an update.

        ``moved`` holds, for each group, whether the group was moved when the update was
        aligned.
        """
        kept = (1 - share) ** 2
        added = share**2
        along = {}
        for name, was_moved in moved.items():
            variance = self.along.get(name, self.across)
            # After a move, the update agrees with the anchor there: the noise stays.
            along[name] = variance if was_moved else kept * variance + added
        return Spread(kept * self.across + added, along)

    def factor(
        self,
        group: Group,
        entries: int,
    ) -> float:
        """Return the factor on the share that chance removes from isotropic noise.

        The group acts on so many ``entries``.
        """
        share = group.action.free / entries
        if not share:
            return 1.0
        across = 1 + self.across
        along = 1 + self.along.get(group.name, self.across)
        return along / (share * along + (1 - share) * across)


@dataclass(frozen=True)
class _Bound:
    """``assignment.separation`` of neurons ``[n]``, and the norm of the largest."""

    separation: Tensor
    largest: Tensor

    def after(self, way: Tensor) -> _Bound:
        """Return a bound that holds after each neuron has moved by at most ``way``.

        The separation is reduced by the neuron's own movement, the largest movement,
        and the rounding error.
        """
        farthest = way.max()
        largest = self.largest + farthest
        rounding = 4 * torch.finfo(torch.float32).eps * largest
        separation = self.separation - way - farthest - rounding
        return _Bound(separation.clamp_min(0), largest)


@dataclass(frozen=True)
class _Known:
    """Results computed from a side's tensors.

    ``bounds`` are by group and number of columns. ``squares``, by group, are the sums
    of the squared norms of its blocks.
    """

    bounds: dict[tuple[str, int | None], _Bound] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Side:
    """The anchor's tensors in the form in which they are compared, canonical or not.

    Bounds and norms of these tensors are computed once for all clients. ``spread`` is
    the noise of the anchor, which changes what chance removes.
    """

    tensors: Tensors
    spread: Spread = field(default_factory=Spread, repr=False)
    _known: _Known = field(default_factory=_Known, repr=False)

    def size(self, group: Group) -> float:
        """Return the sum of the squared norms of a group's blocks.

        An anchor that follows the clients (``Anchor.towards_last``) keeps the sum of
        the round's first anchor, which is exact enough to decide whether a client is
        near.
        """
        squares = self._known.squares
        if group.name not in squares:
            norms = []
            for slot in group.slots:
                block = slot.of(self.tensors[slot.tensor].detach())
                norms.append(torch.linalg.vector_norm(block.float()))
            total = torch.stack(norms).double().square().sum()
            squares[group.name] = float(total)
        return squares[group.name]

    def separation(
        self,
        group: Group,
        columns: int | None,
    ) -> Tensor:
        """Return the bound of ``assignment.separation`` for one group."""
        bounds = self._known.bounds
        key = (group.name, columns)
        if key not in bounds:
            blocks = [a for a, _ in pairs(group, self.tensors, self.tensors)]
            plain, signed = by_sign(group, blocks)
            bounds[key] = _Bound(
                separation(plain, signed, columns),
                largest(blocks),
            )
        return bounds[key].separation


@dataclass(frozen=True)
class Anchor(Side):
    """A model that the updates of a round are aligned to.

    It also stores how the last client was aligned, from which ``towards_last`` derives
    the bounds of an anchor between the two.
    """

    _canonical: _Known = field(default_factory=_Known, repr=False)
    _moved: dict[str, bool] = field(default_factory=dict, repr=False)
    _distances: TensorDict = field(default_factory=dict, repr=False)

    def in_canonical_form(self, tensors: Tensors) -> Side:
        """Return the side of problems in canonical form.

        ``tensors`` are the anchor's tensors in that form.
        """
        return Side(tensors, self.spread, self._canonical)

    def note(
        self,
        moved: Mapping[str, bool],
        distances: Tensors,
    ) -> None:
        """Store which groups of the last client are moved.

        ``distances`` are the squared distances ``[n]`` of neurons that keep their
        order, by group.
        """
        for name in moved:
            self._distances.pop(name, None)
        self._moved.update(moved)
        self._distances.update(distances)

    def forget(self) -> None:
        """Delete what ``note`` stored.

        The last client was aligned to another anchor.
        """
        self._moved.clear()
        self._distances.clear()

    def towards_last(
        self,
        tensors: Tensors,
        share: float,
    ) -> Anchor:
        """Return an anchor with new tensors, between this one and the last client.

        The last client is the client that was aligned to this anchor most recently. The
        new anchor has gone ``share`` (0 to 1) of the way to it, so each neuron has
        moved by at most ``share`` times its stored distance.
        """
        known = _Known(squares=self._known.squares)
        for (name, columns), bound in self._known.bounds.items():
            # Without a distance, nothing bounds the movement: the bound is dropped.
            if name in self._distances:
                way = share * self._distances[name].sqrt() * SLACK
                known.bounds[name, columns] = bound.after(way)
        return Anchor(tensors, self.spread.towards(share, self._moved), known)
