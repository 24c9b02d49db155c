"""The matching problem: ``Anchor``, ``Problem`` of one client, solvers by action, and
``Match``.

A group's action (``fedrot.symmetry.actions``) names its stage. A new kind of group
needs an action, and a registered solver::

    @solves(StreamRotation) def match_stream(groups, problem): return
        [Match(best_rotation(problem.pairs(group)), before, after) for group in groups]
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from fedrot.collect.activations import Activations
from fedrot.errors import SymmetryError, UpdateError
from fedrot.matching import assignment
from fedrot.options import AlignmentOptions
from fedrot.symmetry.describe.mixture import ExpertNeurons
from fedrot.symmetry.groups import Group, Move, Slot, Symmetry, apply_moves
from fedrot.symmetry.signs import SignedPermutation
from fedrot.tensors import Tensors, check_finite, compute_dtype

#: One slot of the anchor and of the client as matrices ``[size, rest]`` of the same
#: dtype.
Pair = tuple[Tensor, Tensor]

#: Number of entries in a block of ``blocks_of``: 64 MiB in float32.
_BLOCK = 2**24

T = TypeVar("T")


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

    def towards(self, share: float, moved: Mapping[str, bool]) -> Spread:
        """Return the spread of an anchor that goes ``share`` of the way to an update.

        ``moved`` holds, for each group, whether the group was moved when the update was
        aligned.
        """
        kept, added = (1 - share) ** 2, share**2
        before = {name: self.along.get(name, self.across) for name in moved}
        along = {
            name: v if moved[name] else kept * v + added for name, v in before.items()
        }
        return Spread(kept * self.across + added, along)

    def factor(self, group: Group, entries: int) -> float:
        """Return the factor on the share that chance removes from isotropic noise on
        ``entries``.
        """
        share = group.action.free / entries
        across, along = 1 + self.across, 1 + self.along.get(group.name, self.across)
        return along / (share * along + (1 - share) * across) if share else 1.0


@dataclass(frozen=True)
class _Known:
    """Results computed from a side's tensors.

    ``bounds``, by group and number of columns, are pairs of ``assignment.separation``
    and the norm of the largest neuron. ``squares``, by group, are the sums of the
    squared norms of its blocks.
    """

    bounds: dict[tuple[str, int | None], tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )
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
            blocks = (
                slot.of(self.tensors[slot.tensor].detach()).float()
                for slot in group.slots
            )
            norms = torch.stack([torch.linalg.vector_norm(block) for block in blocks])
            squares[group.name] = float(norms.double().square().sum())
        return squares[group.name]

    def separation(self, group: Group, columns: int | None) -> Tensor:
        """Return the bound of ``assignment.separation`` for one group."""
        bounds, key = self._known.bounds, (group.name, columns)
        if key not in bounds:
            blocks = [a for a, _ in pairs(group, self.tensors, self.tensors)]
            bound = assignment.separation(*by_sign(group, blocks), columns)
            bounds[key] = bound, assignment.largest(blocks)
        return bounds[key][0]


@dataclass(frozen=True)
class Anchor(Side):
    """A model that the updates of a round are aligned to.

    It also stores how the last client was aligned, from which ``towards_last`` derives
    the bounds of an anchor between the two.
    """

    _canonical: _Known = field(default_factory=_Known, repr=False)
    _last: dict[str, tuple[bool, Tensor | None]] = field(
        default_factory=dict, repr=False
    )

    def in_canonical_form(self, tensors: Tensors) -> Side:
        """Return the side of problems in canonical form, given the anchor's tensors in
        that form.
        """
        return Side(tensors, self.spread, self._canonical)

    def note(self, moved: Mapping[str, bool], distances: Tensors) -> None:
        """Store which groups of the last client are moved.

        ``distances`` are the squared distances ``[n]`` of neurons that keep their
        order, by group.
        """
        self._last.update(
            {name: (was, distances.get(name)) for name, was in moved.items()}
        )

    def forget(self) -> None:
        """Delete what ``note`` stored: the last client was aligned to another
        anchor.
        """
        self._last.clear()

    def towards_last(self, tensors: Tensors, share: float) -> Anchor:
        """Return an anchor with new tensors, ``share`` (0 to 1) of the way to the last
        aligned client.

        The last client is the client that was aligned to this anchor most recently.
        Each neuron moves by at most ``share`` times its stored distance. The known
        bounds on the separation stay valid if they are reduced by the neuron's own
        movement, the largest movement, and the rounding error.
        """
        known = _Known(squares=self._known.squares)
        for key, (bound, size) in self._known.bounds.items():
            _, distances = self._last.get(key[0], (False, None))
            if distances is not None:
                way = share * distances.sqrt() * assignment.SLACK
                size = size + way.max()
                rounding = 4 * torch.finfo(torch.float32).eps * size
                known.bounds[key] = (
                    (bound - way - way.max() - rounding).clamp_min(0),
                    size,
                )
        moved = {name: was for name, (was, _) in self._last.items()}
        return Anchor(tensors, self.spread.towards(share, moved), known)


@dataclass(frozen=True)
class Match:
    """The best element of one group, and the group's squared distances to the anchor.

    Attributes:
        element: None for the identity.
        before: squared distance of the group's weights before the move.
        after: squared distance after the move.
        gain: decrease of the objective, in units of squared distance. It differs from
            ``before - after`` for head permutations, which include the best rotation
            inside the heads, and if activations are used. If no element gains enough
            (``matching.chance.required``), ``gain`` may be an upper bound, and
            ``element`` is None.
        certified: squared distances ``[n]`` of the units, if they prove that the
            identity is optimal.
    """

    element: Tensor | None
    before: float
    after: float
    gain: float = 0.0
    certified: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """The tensors of an anchor and of a client, the options, and activations if there
    are any.

    ``applied`` names the groups whose moves are already applied to the client's
    tensors.
    """

    anchor: Side
    client: Tensors
    symmetry: Symmetry
    options: AlignmentOptions
    activations: Activations | None = None
    applied: frozenset[str] = frozenset()

    def moved(self, moves: Sequence[Move]) -> Problem:
        """Return the problem with the moves applied to the client."""
        activations = (
            None if self.activations is None else self.activations.moved(moves)
        )
        applied = self.applied.union(move.group.name for move in moves)
        client = apply_moves(self.client, moves)
        return replace(self, client=client, activations=activations, applied=applied)

    def pairs(self, group: Group) -> list[Pair]:
        """Return the pairs of all slots of a group."""
        return pairs(group, self.anchor.tensors, self.client)

    def distance(self, group: Group, blocks: Sequence[Pair]) -> float:
        """Return the squared distance of a group's pairs; raise ``UpdateError`` if it
        is not finite.
        """
        return self.finite(float(squared_distance(blocks)), group)

    def finite(self, value: float, group: Group) -> float:
        """Return a group's squared distance; raise ``UpdateError`` if it is not
        finite.
        """
        if not math.isfinite(value):
            for tensors in (self.client, self.anchor.tensors):
                check_finite(
                    {slot.tensor: tensors[slot.tensor] for slot in group.slots}
                )
            raise UpdateError(
                "The squared distance to the anchor overflows in group "
                f"'{group.name}': values are too large for float32. Check the client's "
                "training."
            )
        return value

    def evidence(
        self, group: Group, blocks: Sequence[Pair] | None = None
    ) -> tuple[float, Tensor | None]:
        """Return the factor of the weights' similarity, and the activations' term to
        add to it.

        ``blocks`` are the group's pairs, if the caller has computed them. Both results
        are in units of squared distance. With ``w = options.activation_weight``, a
        group's activations have ``w / (1 - w)`` times the weight of its tensors; with
        ``w = 1`` the factor is 0.
        """
        weight = self.options.activation_weight
        cross = (
            None
            if self.activations is None
            else self.activations.matrices.get(group.name)
        )
        if cross is None or weight == 0:
            return 1.0, None
        blocks = self.pairs(group) if blocks is None else blocks
        cross = cross.to(blocks[0][1].device)
        norms = (
            torch.stack([torch.linalg.vector_norm(m).double() for m in pair])
            for pair in blocks
        )
        size = float(torch.stack([n.square() for n in norms]).sum(0).sqrt().prod())
        if weight == 1:
            return 0.0, size * cross
        return 1.0, weight / (1 - weight) * size * cross

    def total(self, groups: Sequence[Group]) -> float:
        """Return the squared distance of all entries that the groups act on, each
        counted once.
        """
        slots = dict.fromkeys(slot for group in groups for slot in group.slots)
        return distance_once(slots, self.anchor.tensors, self.client)

    def objective(self, groups: Sequence[Group]) -> float:
        """Return the objective of the solvers: squared distance minus twice the
        activations' traces.
        """
        only_activations = (
            self.activations is not None and self.options.activation_weight == 1
        )
        value = 0.0 if only_activations else self.total(groups)
        for group in groups:
            _, addition = self.evidence(group)
            value -= 0.0 if addition is None else 2 * float(addition.trace())
        return value


#: The stages in the order in which they run; each stage sees the elements of earlier
#: stages.
STAGES = ("residual", "output", "heads", "queries", "attention", "experts", "ffn")

#: Stages whose groups share tensors with groups of other stages, so that several sweeps
#: are needed.
COUPLED = ("residual", "output")

#: Finds the best element of each group, given all others; one ``Match`` per group, in
#: order.
Solver = Callable[[Sequence[Group], Problem], list[Match]]

AnySolver = TypeVar("AnySolver", bound=Solver)

#: The solvers by the exact type of the action.
SOLVERS: dict[type, Solver] = {}


def solves(*actions: type) -> Callable[[AnySolver], AnySolver]:
    """Return a decorator that registers a solver for actions of exactly these types."""

    def register(solver: AnySolver) -> AnySolver:
        SOLVERS.update(dict.fromkeys(actions, solver))
        return solver

    return register


def solver_of(group: Group) -> Solver:
    """Return the solver of a group.

    Raises:
        SymmetryError: no solver is registered for the group's action.
    """
    action = type(group.action)
    if action not in SOLVERS:
        raise SymmetryError(
            f"The group '{group.name}' cannot be matched: no solver is registered for "
            f"its action {action.__name__}. Register one with "
            f"@fedrot.matching.problem.solves({action.__name__})."
        )
    return SOLVERS[action]


def stage_of(group: Group) -> str:
    """Return the stage in which a group is matched: its action's stage, or the stage of
    its part.

    Raises:
        SymmetryError: there is no such stage.
    """
    stage = group.action.stage or group.part
    if stage not in STAGES:
        raise SymmetryError(
            f"The group '{group.name}' cannot be matched: the stage '{stage}' of its "
            f"action {type(group.action).__name__} is not in "
            f"fedrot.matching.problem.STAGES: {', '.join(STAGES)}."
        )
    return stage


def match_stage(groups: Sequence[Group], problem: Problem) -> list[Match]:
    """Match the groups of one stage, each solver's groups together; return the matches
    in order.
    """
    return in_batches(groups, solver_of, lambda solver, own: solver(own, problem))


def in_batches(
    groups: Sequence[Group],
    key: Callable[[Group], T],
    match: Callable[[T, list[Group]], list[Match]],
) -> list[Match]:
    """Match the groups of each key together; return the matches in the order of the
    groups.
    """
    batches: dict[T, list[Group]] = defaultdict(list)
    for group in groups:
        batches[key(group)].append(group)
    matches: dict[str, Match] = {}
    for one, own in batches.items():
        matches |= {g.name: m for g, m in zip(own, match(one, own), strict=True)}
    return [matches[group.name] for group in groups]


def pairs(group: Group, anchor: Tensors, client: Tensors) -> list[Pair]:
    """Return the pairs of all slots of a group, as views of the models if possible."""
    found = []
    for slot in group.slots:
        a, c = anchor[slot.tensor].detach(), client[slot.tensor].detach()
        dtype = compute_dtype(c)
        found.append((slot.rows(a, dtype), slot.rows(c, dtype)))
    return found


def blocks_of(slot: Slot, anchor: Tensors, client: Tensors) -> Iterator[Pair]:
    """Yield the pair of one slot in blocks of columns; only one block is in memory in
    float32.
    """
    a, c = anchor[slot.tensor].detach(), client[slot.tensor].detach()
    dtype = compute_dtype(c)
    # Rows in the tensor's dtype are a view: only blocks are converted.
    a, c = slot.rows(a, a.dtype), slot.rows(c, c.dtype)
    columns = max(1, _BLOCK // len(a))
    for ours, theirs in zip(a.split(columns, 1), c.split(columns, 1), strict=True):
        yield ours.to(dtype), theirs.to(dtype)


def by_sign(group: Group, blocks: Sequence[T]) -> tuple[list[T], list[T]]:
    """Split one item per slot into slots that keep their signs, and slots whose signs
    may change.
    """
    signed = isinstance(group.action, SignedPermutation | ExpertNeurons)
    sides: tuple[list[T], list[T]] = ([], [])
    for slot, block in zip(group.slots, blocks, strict=True):
        sides[signed and not slot.unsigned].append(block)
    return sides


def distance_once(slots: Iterable[Slot], anchor: Tensors, client: Tensors) -> float:
    """Return the squared distance of all entries on the slots, each entry counted
    once.
    """
    return float(squared_distance(entries_once(slots, anchor, client)))


def entries_once(
    slots: Iterable[Slot], anchor: Tensors, client: Tensors
) -> Iterator[Pair]:
    """Yield all entries on the slots as pairs of blocks (anchor, client), each entry
    once.
    """
    for name, by_axis in _masks(
        slots, {name: tuple(t.shape) for name, t in client.items()}
    ).items():
        c = client[name].detach()
        a, c = (t.to(compute_dtype(c)) for t in (anchor[name].detach(), c))
        if not any(bool(mask.all()) for mask in by_axis.values()):
            for axis, mask in by_axis.items():
                yield _where(a, mask, axis), _where(c, mask, axis)
                a, c = _where(a, ~mask, axis), _where(c, ~mask, axis)
            continue
        yield a, c


def count_once(slots: Iterable[Slot], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of entries on the slots, each entry counted once."""
    entries = 0
    for name, by_axis in _masks(slots, shapes).items():
        left = [
            n - int(by_axis[d].sum()) if d in by_axis else n
            for d, n in enumerate(shapes[name])
        ]
        entries += math.prod(shapes[name]) - math.prod(left)
    return entries


def _masks(
    slots: Iterable[Slot], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[int, Tensor]]:
    """Return masks by tensor and axis of the entries on a slot, bool ``[length]``."""
    masks: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for slot in slots:
        length = shapes[slot.tensor][slot.axis]
        mask = masks[slot.tensor].setdefault(
            slot.axis, torch.zeros(length, dtype=torch.bool)
        )
        mask |= slot.slice.mask(length)
    return masks


def _where(tensor: Tensor, mask: Tensor, axis: int) -> Tensor:
    return tensor.index_select(axis, mask.nonzero()[:, 0].to(tensor.device))


def squared_distance(blocks: Iterable[Pair]) -> Tensor:
    """Return the sum of squared differences over all pairs, float64 ``[]``.

    It stays on the pairs' device: the CPU waits only when its value is read.
    """
    squares = (torch.linalg.vector_norm(c - a).double() ** 2 for a, c in blocks)
    return sum(squares, start=torch.zeros((), dtype=torch.float64))
