"""``adapter_symmetry``: the rotations of an adapter's factors as a ``Symmetry``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.lora.adapters import pairs_of
from fedrot.strategies.reporting.verdict import MOVEMENTS
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.groups import NO_LAYER, PARTS, Group, Slice, Slot, Symmetry
from reproductions.lora_rivals import without_residuals

#: The part of ``AlignmentOptions`` that these groups belong to.
ADAPTERS = "adapters"
_LAYER = re.compile(r"\.(\d+)\.")
_REFUSED = dict.fromkeys(
    PARTS, f"these are LoRA adapters. Write AlignmentOptions(parts=('{ADAPTERS}',))."
)
PARTS.append(ADAPTERS)
_ROTATION = MOVEMENTS["rotation"]
MOVEMENTS["rotation"] = replace(_ROTATION, parts=(*_ROTATION.parts, ADAPTERS))


def adapter_symmetry(
    tensors: Mapping[str, Tensor] | Mapping[str, Sequence[int]],
) -> Symmetry:
    """Describe the symmetry of LoRA adapters: every pair of factors can be rotated.

    ``R A`` and ``B R^T`` have the product ``B A`` for every orthogonal ``R``. Give the
    result to ``FedRot``, ``Aligned``, ``align_mod`` or ``fedrot.align`` where they
    expect a model's configuration, with ``AlignmentOptions(parts=("adapters",))``. All
    clients need one rank.

    Example: ``align_mod(adapter_symmetry(adapter),
    AlignmentOptions(parts=("adapters",)))``.

    Args:
        tensors: of an adapter, or their shapes, as ``fedrot.lora.adapter_tensors``
            returns them.

    Raises:
        UpdateError: they are no adapter, or two factors have different ranks.
    """
    shapes = {
        n: tuple(getattr(t, "shape", t)) for n, t in without_residuals(tensors).items()
    }
    groups = []
    for pair in pairs_of(shapes):
        rank = shapes[pair.a][0]
        if shapes[pair.b][1] != rank:
            raise UpdateError(
                f"The factors '{pair.a}' {list(shapes[pair.a])} and '{pair.b}' "
                f"{list(shapes[pair.b])} have no common rank."
            )
        found = _LAYER.search(pair.module)
        layer = int(found.group(1)) if found else NO_LAYER
        slots = (Slot(pair.a, 0, Slice(0, rank)), Slot(pair.b, 1, Slice(0, rank)))
        groups.append(Group(pair.module, layer, ADAPTERS, HeadRotation(1, rank), slots))
    layers = 1 + max(group.layer for group in groups)
    return Symmetry("lora", layers, tuple(groups), shapes, refused=_REFUSED)
