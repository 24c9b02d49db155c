"""A model family as data: its stacks of layers, the tensors around them, and its task
heads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedrot.symmetry.describe.layers import Block, axes_of, shared_heads, together
from fedrot.symmetry.describe.spaces import Axes, Space, merged, on_residual
from fedrot.symmetry.describe.task_heads import PLAIN
from fedrot.symmetry.groups import NO_LAYER

#: A configuration of transformers as a dictionary, and the names of a model's tensors
#: without prefix.
Config = Mapping[str, Any]
Names = Collection[str]

#: Describes the layer under a prefix (``encoder.layer.3.``). If a function returns
#: several blocks, the groups of all first blocks come before those of all second
#: blocks.
Layer = Callable[[Config, Names, str], Block | tuple[Block, ...]]

#: Number of axes of buffers that some versions of transformers store, by the end of
#: their names.
BUFFERS = {
    "embeddings.position_ids": 2,
    "embeddings.token_type_ids": 2,
    "rotary_emb.inv_freq": 1,
}


@dataclass(frozen=True)
class Stack:
    """Numbered layers.

    Attributes:
        name: the module that contains the numbered layers, without model prefix:
            ``encoder.layer`` of ``bert.encoder.layer.0.``. Every tensor inside this
            module must be in the description.
        count: the configuration's key for the number of layers. Of several keys, the
            first that is set is used; the last key must exist.
        layer: describes one layer; or a stack inside each layer.
        section: the configuration's key of the section about this stack; empty for the
            whole one.
        order: the name of a group that permutes the heads of all layers, which share
            ``head_bias``.
        head_bias: the relative-position bias ``[buckets, heads]`` that all layers add.
    """

    name: str
    count: str | tuple[str, ...]
    layer: Layer | Stack
    section: str = ""
    order: str = ""
    head_bias: str = ""

    def describe(self, config: Config, names: Names, first: int) -> Block:
        """Return all layers, numbered from ``first``, as one block."""
        config = config[self.section] if self.section else config
        layers = []
        for number, (prefix, layer) in enumerate(self._layers(config), first):
            found = layer(config, names, prefix)
            blocks = found if isinstance(found, tuple) else (found,)
            numbered = (
                [replace(group, layer=number) for group in block.groups]
                for block in blocks
            )
            layers.append(
                [
                    replace(b, groups=tuple(g))
                    for b, g in zip(blocks, numbered, strict=True)
                ]
            )
        alike = zip(*layers, strict=True)
        return together(
            *(shared_heads(self.order, self.head_bias, blocks) for blocks in alike)
        )

    def _layers(self, config: Config) -> Iterator[tuple[str, Layer]]:
        *first, last = (self.count,) if isinstance(self.count, str) else self.count
        count = next(filter(None, map(config.get, first)), None) or config[last]
        for number in range(count):
            prefix = f"{self.name}.{number}."
            if isinstance(self.layer, Stack):
                yield from (
                    (prefix + rest, layer) for rest, layer in self.layer._layers(config)
                )
            else:
                yield prefix, self.layer


@dataclass(frozen=True)
class When:
    """Items that a model has if it has a tensor, or if its configuration and names meet
    a condition.
    """

    condition: str | Callable[[Config, Names], bool]
    items: tuple[Axes | Block | Stack, ...]

    def holds(self, config: Config, names: Names) -> bool:
        """Return whether a model has the items."""
        if isinstance(self.condition, str):
            return self.condition in names
        return self.condition(config, names)


def optional(*modules: Axes) -> tuple[When, ...]:
    """Return modules that a model has if it has their first tensor."""
    return tuple(When(next(iter(axes)), (axes,)) for axes in modules)


#: How a family's residual stream moves, see ``Family.stream``.
ROTATED = "rotated"
POST_NORM = "permuted: norms act on the stream after its blocks"
NORM_IN_FRONT = "permuted: a norm lies between embeddings and stream"

#: An element of a family's description.
Item = Axes | Block | Stack | When


@dataclass(frozen=True, eq=False)
class Family:
    """A model family as data.

    Attributes:
        model_types: the values of ``model_type`` in its configurations.
        body: embeddings, stacks of layers and norms, in the order of the forward pass.
            A model must have all of these tensors; otherwise groups across layers are
            refused.
        task_heads: every task head of the family, of which a model has some, and other
            optional tensors.
        spaces: the spaces by name; a space that is not listed is a plain permutation.
        inside: modules of the encoder that ``body`` does not name, such as a pooler.
            Task heads are outside the encoder.
        buffers: number of axes of tensors that no group moves, by the end of their
            names.
        stream: how the residual stream moves in canonical form, only for tables of
            families. For a model, ``Symmetry.folds`` decides.

    Names of tensors have no model prefix.
    """

    name: str
    model_types: tuple[str, ...]
    body: tuple[Item, ...]
    task_heads: tuple[Axes | When, ...] = (PLAIN,)
    spaces: Mapping[str, Space] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    buffers: Mapping[str, int] = field(default_factory=lambda: BUFFERS)
    stream: str = ROTATED

    @property
    def stacks(self) -> tuple[str, ...]:
        """The names of the stacks."""
        return tuple(
            item.name for item in _chosen(self.body) if isinstance(item, Stack)
        )

    @property
    def encoder(self) -> frozenset[str]:
        """The modules of the encoder; task heads are outside of it."""
        places = (
            [item.name] if isinstance(item, Stack) else list(axes_of(item))
            for item in _chosen(self.body)
        )
        return frozenset(
            {place.partition(".")[0] for names in places for place in names}
            | {*self.inside}
        )

    def describe(self, config: Config, names: Names) -> tuple[Block, Axes]:
        """Return the body of one model, and the axes of its task heads and buffers."""

        def holds(item: When) -> bool:
            return item.holds(config, names)

        body, layers = Block(), 0
        for item in _chosen(self.body, holds):
            block = (
                item.describe(config, names, layers)
                if isinstance(item, Stack)
                else item
            )
            body = together(body, block)
            layers = 1 + max((group.layer for group in body.groups), default=NO_LAYER)
        heads = [
            axes_of(i)
            for i in _chosen(self.task_heads, holds)
            if not isinstance(i, Stack)
        ]
        buffers = {
            name: (None,) * axes
            for name in names
            for end, axes in self.buffers.items()
            if f".{name}".endswith(f".{end}")
        }
        absent = [
            name for name, space in self.spaces.items() if not space.exists(names)
        ]
        return (
            replace(body, axes=on_residual(body.axes, absent)),
            on_residual(merged(*heads, buffers), absent),
        )


def _chosen(
    items: Sequence[Item], holds: Callable[[When], bool] = lambda item: True
) -> Iterator[Axes | Block | Stack]:
    for item in items:
        if not isinstance(item, When):
            yield item
        elif holds(item):
            yield from item.items


def rotary_units(config: Config, dim: int, default: float = 1.0) -> int:
    """Return the number of a head's ``dim`` units that rotary positions rotate.

    Only for families that rotate a part of the head; others ignore these keys of the
    configuration.

    Args:
        default: the share that the family rotates if the configuration has none.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = parameters.get("partial_rotary_factor")
    for key in ("partial_rotary_factor", "rotary_pct"):
        share = config.get(key) if share is None else share
    units = int(dim * (default if share is None else share))
    return units + units % 2  # units rotate in pairs
