"""The symmetry of a model: ``symmetry_of``, the families, and the data of groups."""

from __future__ import annotations

from collections.abc import Sequence

from fedrot.symmetry.describe.family import Family
from fedrot.symmetry.families import FAMILIES
from fedrot.symmetry.groups import (
    DEFAULT_PARTS,
    NO_LAYER,
    PARTS,
    WHOLE_MODEL,
    Group,
    Slot,
    Symmetry,
)
from fedrot.symmetry.resolve import (
    TensorsOrShapes,
    family_of,
    model_types,
    resolve,
    settings_of,
)

__all__ = [
    "DEFAULT_PARTS",
    "FAMILIES",
    "NO_LAYER",
    "PARTS",
    "WHOLE_MODEL",
    "Family",
    "Group",
    "Slot",
    "Symmetry",
    "check_family",
    "supported",
    "symmetry_of",
]


def supported() -> tuple[str, ...]:
    """Return the supported ``model_type`` names."""
    return model_types(FAMILIES)


def check_family(config: object) -> None:
    """Raise ``SymmetryError`` if the configuration's architecture is not supported."""
    family_of(settings_of(config), FAMILIES)


def symmetry_of(
    config: object, tensors: TensorsOrShapes, families: Sequence[Family] = FAMILIES
) -> Symmetry:
    """Describe the symmetry groups of a model.

    Args:
        config: a transformers configuration or its dictionary; ``model_type`` selects
            the family.
        tensors: the state dict, or ``{name: shape}``. Prefixes of models (``bert.``,
            ``model.``) and wrappers (``module.``, ``_orig_mod.``) are accepted. Tied
            tensors are recognised only in a state dict.
        families: the known architectures; put your own family in front of ``FAMILIES``.

    Raises:
        SymmetryError: the family is not supported, a tensor is missing or misshapen, or
            a tensor inside the layers is not in the family's description.
    """
    return resolve(config, tensors, families)
