"""What a model family has to declare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedrot.symmetry.description import Group


@dataclass(frozen=True)
class Family:
    """A model family as data.

    ``stack`` is the name, without any model prefix, under which the layers live: every tensor below
    it must be placed, in a group or in ``unmoved``. ``describe(config, layer)`` returns the groups of
    one layer; ``unmoved`` the modules of a layer that no group touches.
    """

    name: str
    model_types: tuple[str, ...]
    layers_key: str
    stack: str
    describe: Callable[[Mapping[str, Any], int], tuple[Group, ...]]
    unmoved: tuple[str, ...]
