"""What a model family has to declare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fedrot.symmetry.axes import Axes
from fedrot.symmetry.description import Group
from fedrot.symmetry.kinds import Permutation

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A model family as data.

    Attributes:
        stack: the name, without any model prefix, under which the layers live: every tensor below it
            must have a place in ``body``.
        encoder: the encoder's own modules; task heads stand beside them.
        describe: ``(config, layer)`` to the groups inside one layer.
        body: ``(config, layers, names)`` to the spaces on the axes of the embeddings and of all
            layers; all of these tensors are needed before the residual stream may be moved.
        heads: ``(config, names)`` to the spaces on the axes of every task head of the family, of
            which a model has some.
        spaces: ``config`` to the kind of every space but ``residual``, by name.

    ``names`` are the model's tensors without prefix.
    """

    name: str
    model_types: tuple[str, ...]
    layers_key: str
    stack: str
    encoder: tuple[str, ...]
    describe: Callable[[Config, int], tuple[Group, ...]]
    body: Callable[[Config, int, Collection[str]], Axes]
    heads: Callable[[Config, Collection[str]], Axes]
    spaces: Callable[[Config], Mapping[str, type[Permutation]]]
