"""What a model family has to declare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fedrot.symmetry.actions import Permutation
from fedrot.symmetry.layers import Block
from fedrot.symmetry.spaces import Axes

Config = Mapping[str, Any]
Names = Collection[str]


def _no_spaces(config: Config) -> Mapping[str, type[Permutation]]:
    return {}


@dataclass(frozen=True)
class Family:
    """A model family as data.

    Attributes:
        model_types: the values of ``model_type`` in its configurations.
        stacks: the names, without any model prefix, under which its layers are numbered: every tensor
            below one must have a place in ``body``.
        body: ``(config, names)`` to the groups inside the layers and the spaces on the axes of
            embeddings and layers; all of these tensors are needed before what crosses layers may be
            moved.
        heads: ``(config, names)`` to the spaces on the axes of every task head of the family, of which
            a model has some, and of buffers that a model may have.
        encoder: the family's own modules, beside which task heads stand.
        spaces: ``config`` to the kind of every space that is not a plain permutation, by name.

    ``names`` are the model's tensors without prefix.
    """

    name: str
    model_types: tuple[str, ...]
    stacks: tuple[str, ...]
    body: Callable[[Config, Names], Block]
    heads: Callable[[Config, Names], Axes]
    encoder: tuple[str, ...] = ()
    spaces: Callable[[Config], Mapping[str, type[Permutation]]] = _no_spaces


def rotary_units(config: Config, dim: int, default: float = 1.0) -> int:
    """Return how many of a head's ``dim`` units rotary positions turn, in a family that turns a part.

    Other families turn whole heads, whatever their configuration says.

    Args:
        default: the share that the family turns if the configuration does not say.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = parameters.get("partial_rotary_factor")
    for key in ("partial_rotary_factor", "rotary_pct"):
        share = config.get(key) if share is None else share
    units = int(dim * (default if share is None else share))
    return units + units % 2  # an odd one turns with a partner
