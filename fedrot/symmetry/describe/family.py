"""A model family as data: its stacks of layers, their surroundings, its task heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedrot.errors import SymmetryError
from fedrot.symmetry.describe.layers import Block, axes_of, shared_heads, together
from fedrot.symmetry.describe.spaces import Axes, Space, merged, on_residual
from fedrot.symmetry.describe.task_heads import (
    PLAIN,
    UNMEASURED,
    Features,
    FeaturesByType,
)

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
            blocks = layer(config, names, prefix)
            if isinstance(blocks, Block):
                blocks = (blocks,)
            layers.append([block.numbered(number) for block in blocks])
        # Groups are applied in order: those of all first blocks, then all second ones.
        alike = zip(*layers, strict=True)
        return together(
            *(shared_heads(self.order, self.head_bias, blocks) for blocks in alike)
        )

    def _layers(self, config: Config) -> Iterator[tuple[str, Layer]]:
        *first, last = (self.count,) if isinstance(self.count, str) else self.count
        counts = filter(None, map(config.get, first))
        count = next(counts, None) or config[last]
        for number in range(count):
            prefix = f"{self.name}.{number}."
            if isinstance(self.layer, Stack):
                for rest, layer in self.layer._layers(config):
                    yield prefix + rest, layer
            else:
                yield prefix, self.layer


#: What lies in a model: axes of tensors, blocks, and stacks of layers.
Piece = Axes | Block | Stack
Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class When:
    """Items that a model has if it has a tensor, or meets a condition."""

    condition: str | Callable[[Config, Names], bool]
    items: Pieces

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

#: An element of a family's description; some models lack it.
Item = Piece | When


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
        features: what bounds the inputs of the last layer of a classifier; by model
            type if the types differ. Clients' sums of larger features are refused.

        hidden: what bounds the last hidden states of tokens, which a
            ``PooledClassifier`` reads; by model type if the types differ.

    Names of tensors have no model prefix, except in ``features``.
    """

    name: str
    model_types: tuple[str, ...]
    body: tuple[Item, ...]
    task_heads: tuple[Axes | When, ...] = (PLAIN,)
    spaces: Mapping[str, Space] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    buffers: Mapping[str, int] = field(default_factory=lambda: BUFFERS)
    stream: str = ROTATED
    hidden: FeaturesByType = UNMEASURED
    # Without a default: a family that says nothing would have no bound, silently.
    features: FeaturesByType = field(kw_only=True)

    def __post_init__(self) -> None:
        for name in self.model_types:
            if isinstance(self.features, Mapping) and name not in self.features:
                raise SymmetryError(
                    f"Family '{self.name}' does not say what bounds the features of "
                    f"'{name}'. Add it to 'features', as AfterTanh, AfterNorm, or "
                    "Unbounded with the reason."
                )

    def features_of(self, model_type: str, pooled: bool = False) -> Features:
        """Return what bounds the features of a model type of this family.

        ``pooled``: those of a ``PooledClassifier``.
        """
        features = self.hidden if pooled else self.features
        if isinstance(features, Mapping):
            return features[model_type]
        return features

    @property
    def stacks(self) -> tuple[str, ...]:
        """The names of the stacks."""
        return tuple(
            item.name for item in _chosen(self.body) if isinstance(item, Stack)
        )

    @property
    def encoder(self) -> set[str]:
        """The modules of the encoder; task heads are outside of it."""
        modules = {*self.inside}
        for item in _chosen(self.body):
            names = (item.name,) if isinstance(item, Stack) else axes_of(item)
            modules.update(name.partition(".")[0] for name in names)
        return modules

    def describe(self, config: Config, names: Names) -> tuple[Block, Axes]:
        """Return the body of one model, and the axes of its task heads and buffers."""

        def holds(item: When) -> bool:
            return item.holds(config, names)

        body = Block()
        for item in _chosen(self.body, holds):
            if isinstance(item, Stack):
                # Layers of a decoder are numbered after those of the encoder.
                item = item.describe(config, names, body.layers)
            body = together(body, item)
        items = _chosen(self.task_heads, holds)
        outside = [axes_of(item) for item in items if not isinstance(item, Stack)]
        buffers: dict[str, tuple[None, ...]] = {}
        for name in names:
            for end, axes in self.buffers.items():
                if f".{name}".endswith(f".{end}"):
                    buffers[name] = (None,) * axes
        absent = [
            name for name, space in self.spaces.items() if not space.exists(names)
        ]
        inside = replace(body, axes=on_residual(body.axes, absent))
        return inside, on_residual(merged(*outside, buffers), absent)


def _chosen(
    items: Sequence[Item], holds: Callable[[When], bool] = lambda item: True
) -> Iterator[Piece]:
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
