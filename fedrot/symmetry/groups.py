"""A model's symmetry as plain data: which group acts on which axis of which tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedrot.errors import SymmetryError
from fedrot.symmetry.actions import Kind

#: What can be moved. ``AlignmentOptions`` and ``random_equivalent`` share this vocabulary.
PARTS = ("residual", "output", "heads", "attention", "rescale", "ffn")

#: The parts that are moved unless the caller asks otherwise.
DEFAULT_PARTS = ("attention", "ffn")

#: Every isometric part: what models from different starts need.
WHOLE_MODEL = ("residual", "output", "heads", "attention", "ffn")

#: The ``layer`` of groups that belong to no single layer.
NO_LAYER = -1


@dataclass(frozen=True)
class Slice:
    """A part of an axis: the blocks of ``every`` entries from ``start`` to ``stop``, of each only
    ``[low, high)``.

    With ``every`` 0 it is all of ``[start, stop)``. Fused projections keep each head's queries, keys and
    values side by side, and partial rotary positions concern the first entries of each head.
    """

    start: int
    stop: int
    every: int = 0
    low: int = 0
    high: int = 0

    @property
    def size(self) -> int:
        """How many entries it has."""
        whole = self.stop - self.start
        return whole // self.every * (self.high - self.low) if self.every else whole

    def view(self, x: Tensor, axis: int) -> Tensor:
        """Return the stretch of ``x`` as a view, with two axes ``[blocks, high - low]`` for blocks."""
        found = x.narrow(axis, self.start, self.stop - self.start)
        if not self.every:
            return found
        return found.unflatten(axis, (-1, self.every)).narrow(axis + 1, self.low, self.high - self.low)

    def of(self, x: Tensor, axis: int) -> Tensor:
        """Return the stretch of ``x`` on one axis, a view where it can."""
        found = self.view(x, axis)
        return found.flatten(axis, axis + 1) if self.every else found

    def write(self, x: Tensor, axis: int, value: Tensor) -> None:
        """Replace the stretch of ``x``, in place."""
        place = self.view(x, axis)
        place.copy_(value.reshape(place.shape))

    def mask(self, length: int) -> Tensor:
        """Return which of ``length`` entries it has, bool ``[length]``."""
        mask = torch.zeros(length, dtype=torch.bool)
        self.view(mask, 0).fill_(True)
        return mask


@dataclass(frozen=True)
class Slot:
    """A stretch of one axis of one tensor, on the co- or contravariant side of a group.

    ``unsigned``: signs do not show there (the gain of an RMSNorm, the gate of a gated feed-forward).
    """

    tensor: str
    axis: int
    slice: Slice
    contravariant: bool = False
    unsigned: bool = False

    @property
    def size(self) -> int:
        """How many entries of the axis it has."""
        return self.slice.size

    def of(self, tensor: Tensor) -> Tensor:
        """Return this stretch of ``tensor``, a view where it can."""
        return self.slice.of(tensor, self.axis)

    def rows(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return this stretch as a matrix ``[size, rest]`` of ``dtype``, a view where it can."""
        leading = self.of(tensor).to(dtype).movedim(self.axis, 0)
        return leading.unsqueeze(1) if leading.ndim == 1 else leading.flatten(1)


@dataclass(frozen=True)
class Group:
    """One symmetry group of the model.

    ``layer`` is ``NO_LAYER`` where the group acts on the whole model. ``within`` names the head
    permutation that moves this group's heads as a whole, if any.
    """

    name: str
    layer: int
    part: str
    kind: Kind
    slots: tuple[Slot, ...]
    within: str = ""


@dataclass(frozen=True)
class RedundantBias:
    """A bias that may have any value: what it does is nothing, or what another bias could do.

    Attributes:
        bias: its entries.
        read: where the output projection reads the units that carry the bias; None where nobody sees it
            (a key's bias adds the same to every score of a softmax).
        taken_up: the output projection's bias, which can take up what the bias does.
        heads: how many heads the bias has.
    """

    bias: Slot
    heads: int
    read: Slot | None = None
    taken_up: str = ""


@dataclass(frozen=True)
class Symmetry:
    """The symmetry groups of a model, in the order in which their elements are applied.

    ``shapes`` holds the shape of every tensor of the model, moved or not; ``tied`` the sets of names
    that share storage (empty when the symmetry was built from shapes alone); ``refused`` the parts
    that cannot be moved in this model, with the reason; ``redundant_biases`` the attention biases
    that change
    nothing (``fedrot.canonical_biases``).
    """

    family: str
    layers: int
    groups: tuple[Group, ...] = field(repr=False)
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    tied: tuple[tuple[str, ...], ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    redundant_biases: tuple[RedundantBias, ...] = field(default=(), repr=False)

    def select(self, parts: tuple[str, ...], layers: tuple[int, ...] | None = None) -> tuple[Group, ...]:
        """Return the groups of the given parts and layers (all layers if None), in order.

        Groups of the whole model belong to no layer and are selected by part alone.

        Raises:
            SymmetryError: a part cannot be moved in this model.
        """
        for part in parts:
            if part in self.refused:
                raise SymmetryError(f"Part '{part}' cannot be moved: {self.refused[part]}")
        return tuple(
            group
            for group in self.groups
            if group.part in parts and (layers is None or group.layer in (NO_LAYER, *layers))
        )


def check_symmetry(symmetry: object) -> None:
    """Check that a symmetry is one.

    Raises:
        SymmetryError: it is something else, a configuration or a model, say.
    """
    if not isinstance(symmetry, Symmetry):
        raise SymmetryError(
            f"The symmetry is a {type(symmetry).__name__}; build it first with "
            "fedrot.symmetry_of(model.config, model.state_dict())."
        )
