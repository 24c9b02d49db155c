"""A model's symmetry as data: ``Symmetry``, its groups and slots, and their moves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedrot.errors import SymmetryError
from fedrot.symmetry.actions import Action
from fedrot.symmetry.stream import Fold, Place, StreamRotation
from fedrot.tensors import Shapes, TensorDict, Tensors, compute_dtype, full_float32

#: The parts that are moved by default.
DEFAULT_PARTS = ("attention", "ffn")

#: Every isometric part, for models of different initialisations.
WHOLE_MODEL = ("residual", "output", "heads", "attention", "ffn")

#: The names of the parts of a model that can be moved, for ``AlignmentOptions`` and
#: ``random_equivalent``. Plug-ins add theirs.
PARTS = [*WHOLE_MODEL]

#: The ``layer`` of groups that belong to no single layer.
NO_LAYER = -1

#: Sets of names of tensors that share storage.
Ties = tuple[tuple[str, ...], ...]

#: Why a part cannot be moved, or a stream cannot be rotated, by its name.
Reasons = dict[str, str]


@dataclass(frozen=True)
class Slice:
    """Entries of an axis: ``[start, stop)``.

    With ``every``, only the entries ``[low, high)`` of each block of ``every`` entries.
    Blocks are for fused projections, which store queries, keys and values of each head
    together, and for partial rotary positions, which rotate the first entries of each
    head.
    """

    start: int
    stop: int
    every: int = 0
    low: int = 0
    high: int = 0

    @property
    def size(self) -> int:
        """The number of entries."""
        whole = self.stop - self.start
        return whole // self.every * (self.high - self.low) if self.every else whole

    def view(self, x: Tensor, axis: int) -> Tensor:
        """Return the slice of ``x`` as a view, blocks as ``[blocks, high - low]``."""
        whole = x.narrow(axis, self.start, self.stop - self.start)
        if not self.every:
            return whole
        blocks = whole.unflatten(axis, (-1, self.every))
        return blocks.narrow(axis + 1, self.low, self.high - self.low)

    def of(self, x: Tensor, axis: int) -> Tensor:
        """Return the slice of ``x`` on one axis, as a view if possible."""
        view = self.view(x, axis)
        return view.flatten(axis, axis + 1) if self.every else view

    def write(self, x: Tensor, axis: int, value: Tensor) -> None:
        """Replace the slice of ``x``, in place."""
        place = self.view(x, axis)
        place.copy_(value.reshape(place.shape))

    def mask(self, length: int) -> Tensor:
        """Return which of ``length`` entries belong to the slice, bool ``[length]``."""
        mask = torch.zeros(length, dtype=torch.bool)
        self.view(mask, 0).fill_(True)
        return mask


@dataclass(frozen=True)
class Slot:
    """A slice of one axis of one tensor, on the co- or contravariant side of a group.

    ``unsigned``: signs of an element are ignored (gain of an RMSNorm, gate of a gated
    feed-forward). ``experts``: axis 0 is the number of experts; each expert has its own
    units on ``axis``.
    """

    tensor: str
    axis: int
    slice: Slice
    contravariant: bool = False
    unsigned: bool = False
    experts: bool = False

    @property
    def size(self) -> int:
        """The number of entries on the axis."""
        return self.slice.size

    def of(self, tensor: Tensor) -> Tensor:
        """Return this slice of ``tensor``, as a view if possible."""
        return self.slice.of(tensor, self.axis)

    def rows(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return this slice as a matrix ``[size, rest]``, as a view if possible.

        With ``experts`` it is ``[experts * size, rest]``.
        """
        entries = self.of(tensor).to(dtype)
        if self.experts:
            return entries.movedim(self.axis, 1).flatten(0, 1).flatten(1)
        leading = entries.movedim(self.axis, 0)
        return leading.unsqueeze(1) if leading.ndim == 1 else leading.flatten(1)


@dataclass(frozen=True)
class Group:
    """One symmetry group of a model.

    Attributes:
        layer: ``NO_LAYER`` if the group acts on the whole model.
        within: the name of the head permutation that moves this group's heads as a
            whole, if any.
    """

    name: str
    layer: int
    part: str
    action: Action
    slots: tuple[Slot, ...]
    within: str = ""


#: Groups in the order in which their elements are applied.
Groups = tuple[Group, ...]


@dataclass(frozen=True)
class RedundantBias:
    """An attention bias that can be 0 without changing the function.

    A key's bias adds the same number to every score of a softmax. A value's bias adds a
    constant to the block's output, as the bias of the output projection does.

    Attributes:
        bias: the entries of the bias.
        heads: the number of its heads.
        read: the inputs of the output projection that contain the bias; None for a
            key's bias.
        taken_up: the output projection's bias, to which the constant is added.
    """

    bias: Slot
    heads: int
    read: Slot | None = None
    taken_up: str = ""

    @property
    def tensors(self) -> set[str]:
        """The names of all tensors that are read or changed when it is dropped."""
        read = self.read.tensor if self.read else ""
        return {self.bias.tensor, self.taken_up, read} - {""}


@dataclass(frozen=True)
class Symmetry:
    """The symmetry groups of a model.

    Attributes:
        groups: in the order in which their elements are applied.
        shapes: of every tensor of the model, moved or not.
        tied: the sets of names that share storage; empty if the symmetry was built from
            shapes alone.
        refused: the parts that cannot be moved in this model, with the reason.
        redundant_biases: see ``fedrot.canonical``.
        folds: the norms of the residual streams that can be rotated, see
            ``fedrot.canonical``.
        centred: the axes, by name of the tensor, on which canonical tensors have mean
            0.
        unfolded: the residual streams that can only be permuted, with the reason.
        rotates: whether the streams with ``folds`` are rotated; see ``rotated``.
    """

    family: str
    layers: int
    groups: Groups = field(repr=False)
    shapes: Shapes = field(repr=False)
    tied: Ties = ()
    refused: Reasons = field(default_factory=dict)
    redundant_biases: tuple[RedundantBias, ...] = field(default=(), repr=False)
    folds: tuple[Fold, ...] = field(default=(), repr=False)
    centred: tuple[Place, ...] = field(default=(), repr=False)
    unfolded: Reasons = field(default_factory=dict)
    rotates: bool = False

    @cached_property
    def rotated(self) -> Symmetry:
        """The symmetry of canonical tensors: streams with folded norms are rotated.

        Raises:
            SymmetryError: there is no such stream.
        """
        if self.rotates:
            return self
        streams = {fold.space for fold in self.folds}
        if not streams:
            reason = next(iter(self.unfolded.values()), "the model has no such stream")
            raise SymmetryError(
                f"The residual stream cannot be rotated: {reason}. Permute it with "
                "canonical=False."
            )
        gains = {fold.gain for fold in self.folds}
        centred = {name for name, _ in self.centred}
        groups = []
        for group in self.groups:
            if group.name in streams:
                slots = tuple(slot for slot in group.slots if slot.tensor not in gains)
                keeps_ones = any(slot.tensor in centred for slot in slots)
                group = replace(
                    group,
                    action=StreamRotation(1, slots[0].size, keeps_ones),
                    slots=slots,
                )
            groups.append(group)
        # A weight that reads a norm is separate once the norm's gain is folded into it.
        alike = (tuple(x for x in tie if x not in self.readers) for tie in self.tied)
        tied = tuple(names for names in alike if len(names) > 1)
        return replace(self, groups=tuple(groups), tied=tied, rotates=True)

    @property
    def can_rotate(self) -> bool:
        """True if a stream can be rotated, and no tied tensors prevent this."""
        return bool(self.folds) and not self.untied

    @property
    def untied(self) -> Ties:
        """The tied tensors that are separate in canonical form.

        They are embeddings that also read a norm.
        """
        return tuple(
            tie for tie in self.tied if 0 < len(self.readers & {*tie}) < len(tie)
        )

    @cached_property
    def readers(self) -> frozenset[str]:
        """The weights that read the norms of ``folds``."""
        return frozenset(
            reader.weight for fold in self.folds for reader in fold.readers
        )

    @property
    def changed_together(self) -> list[set[str]]:
        """The sets of tensors that the canonical form changes together."""
        folds = [fold.tensors for fold in self.folds]
        return [redundant.tensors for redundant in self.redundant_biases] + folds

    def around(self, names: Collection[str]) -> Symmetry:
        """Return the symmetry, without groups, for the canonical form of some tensors.

        Its ``shapes`` are these tensors, and the tensors that folds and redundant
        biases connect to them.
        """
        chosen = {*names}
        size = -1
        while len(chosen) != size:
            size = len(chosen)
            for connected in self.changed_together:
                if connected & chosen:
                    chosen |= connected
        return self.restricted(chosen)

    def restricted(self, names: Collection[str], groups: Groups = ()) -> Symmetry:
        """Return the symmetry of some tensors only, with these groups.

        ``names`` must contain all tensors of a fold or of a redundant bias, or none of
        them.
        """
        biases = (x for x in self.redundant_biases if x.bias.tensor in names)
        folds = (fold for fold in self.folds if fold.gain in names)
        centred = (place for place in self.centred if place[0] in names)
        return replace(
            self,
            groups=groups,
            shapes={name: self.shapes[name] for name in self.shapes if name in names},
            tied=(),
            redundant_biases=tuple(biases),
            folds=tuple(folds),
            centred=tuple(centred),
        )

    def select(
        self, parts: Sequence[str], layers: tuple[int, ...] | None = None
    ) -> Groups:
        """Return the groups of parts and layers (all layers if None), in order.

        Groups of the whole model are selected by part only.

        Raises:
            SymmetryError: a part cannot be moved in this model.
        """
        for part in parts:
            if part in self.refused:
                raise SymmetryError(
                    f"Part '{part}' cannot be moved: {self.refused[part]} Leave "
                    f"'{part}' out of the parts."
                )
        groups = (group for group in self.groups if group.part in parts)
        if layers is not None:
            groups = (group for group in groups if group.layer in (NO_LAYER, *layers))
        return tuple(groups)


def check_symmetry(symmetry: object) -> None:
    """Raise ``SymmetryError`` if the argument, such as a configuration, is none."""
    if not isinstance(symmetry, Symmetry):
        raise SymmetryError(
            f"The symmetry is a {type(symmetry).__name__}; build it first with "
            "fedrot.symmetry_of(model.config, model.state_dict())."
        )


@dataclass(frozen=True)
class Move:
    """One element of one group."""

    group: Group
    element: Tensor

    @property
    def inverse(self) -> Move:
        """The move that undoes this one."""
        return Move(self.group, self.group.action.inverse(self.element))

    def on(self, tensor: Tensor, slot: Slot) -> Tensor:
        """Return a contiguous copy of a tensor with one slot moved, in its dtype."""
        element = self.element.abs() if slot.unsigned else self.element
        part = slot.of(tensor.detach()).to(compute_dtype(tensor))
        act = self.group.action.act
        moved = act(element, part, slot.axis, slot.contravariant).to(tensor.dtype)
        if slot.size == tensor.shape[slot.axis]:
            return moved.contiguous()
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        slot.slice.write(out, slot.axis, moved)
        return out


@full_float32()
def apply_moves(tensors: Tensors, moves: Iterable[Move]) -> TensorDict:
    """Return the tensors with the moves applied in order; untouched ones are shared."""
    out = dict(tensors)
    with torch.no_grad():
        for move in moves:
            for slot in move.group.slots:
                out[slot.tensor] = move.on(out[slot.tensor], slot)
    return out
