"""A model's symmetry as plain data: which group acts on which axis of which tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedrot.errors import SymmetryError
from fedrot.symmetry.kinds import Kind

#: What can be moved. ``AlignmentOptions`` and ``random_equivalent`` share this vocabulary.
PARTS = ("residual", "output", "heads", "attention", "rescale", "ffn")

#: The parts that are moved unless the caller asks otherwise.
DEFAULT_PARTS = ("attention", "ffn")

#: Every isometric part: what models from different starts need.
WHOLE_MODEL = ("residual", "output", "heads", "attention", "ffn")

#: The ``layer`` of groups that belong to no single layer.
NO_LAYER = -1


@dataclass(frozen=True)
class Slot:
    """A stretch ``[start, stop)`` of one axis of one tensor, on the co- or contravariant side."""

    tensor: str
    axis: int
    start: int
    stop: int
    contravariant: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """Return this stretch of ``tensor`` as a view."""
        return tensor.narrow(self.axis, self.start, self.stop - self.start)

    def rows(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return this stretch as a matrix ``[stop - start, rest]`` of ``dtype``, a view if it can."""
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
class Symmetry:
    """The symmetry groups of a model, in the order in which their elements are applied.

    ``shapes`` holds the shape of every tensor of the model, moved or not; ``tied`` the sets of names
    that share storage (empty when the symmetry was built from shapes alone); ``refused`` the parts
    that cannot be moved in this model, with the reason.
    """

    family: str
    layers: int
    groups: tuple[Group, ...]
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    tied: tuple[tuple[str, ...], ...] = ()
    refused: dict[str, str] = field(default_factory=dict)

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
