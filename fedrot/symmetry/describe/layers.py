"""The usual blocks of a transformer layer: their groups, what they read and write.

A family calls these functions with the names of its modules. The ``Stack`` that
contains a layer sets the layer number of its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedrot.symmetry.actions import (
    Action,
    HeadPermutation,
    HeadRotation,
    Permutation,
    QueryPermutation,
)
from fedrot.symmetry.describe.projections import Heads, Projections, Units, units
from fedrot.symmetry.describe.spaces import RESIDUAL, Axes, Norms, merged, norm, read
from fedrot.symmetry.groups import (
    NO_LAYER,
    Group,
    Groups,
    Reasons,
    RedundantBias,
    Slice,
    Slot,
)
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from fedrot.symmetry.signs import SignedPermutation


@dataclass(frozen=True)
class Block:
    """A piece of a model: its groups, its tensors' spaces, and its redundant biases.

    ``refused`` holds the parts that cannot be moved because of this block, with the
    reason. ``norms`` holds, by norm, the weights that read the norm, see ``pre_norm``
    and ``last_norm``.
    """

    groups: Groups = ()
    axes: Axes = field(default_factory=dict)
    redundant_biases: tuple[RedundantBias, ...] = ()
    refused: Reasons = field(default_factory=dict)
    norms: Norms = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """The number of numbered layers."""
        return 1 + max((group.layer for group in self.groups), default=NO_LAYER)

    def numbered(self, layer: int) -> Block:
        """Return the block with this layer number on its groups."""
        return replace(
            self, groups=tuple(replace(group, layer=layer) for group in self.groups)
        )


def axes_of(item: Block | Axes) -> Axes:
    """Return the axes of a block; axes are returned as they are."""
    return item.axes if isinstance(item, Block) else item


def together(*blocks: Block | Axes) -> Block:
    """Return several blocks as one; axes are a block without groups."""
    groups: list[Group] = []
    biases: list[RedundantBias] = []
    refused: Reasons = {}
    norms: dict[str, tuple[str, ...]] = {}
    for block in blocks:
        if not isinstance(block, Block):
            continue
        groups += block.groups
        biases += block.redundant_biases
        refused |= block.refused
        # A norm may be read in several blocks: the encoder's last one, in every layer.
        for module, weights in block.norms.items():
            norms[module] = norms.get(module, ()) + weights
    axes = merged(*map(axes_of, blocks))
    return Block(tuple(groups), axes, tuple(biases), refused, norms)


def pre_norm(
    module: str, *blocks: Block, space: str = RESIDUAL, memory: Sequence[str] = ()
) -> Block:
    """Return blocks that read the stream only through a norm: ``x + block(norm(x))``.

    ``memory`` are the blocks' weights that read another norm's output.
    """
    inside = together(*blocks)
    readers = (
        name
        for name, axes in inside.axes.items()
        if read(space) in axes and name not in memory
    )
    return together(norm(module, space), inside, Block(norms={module: tuple(readers)}))


def pre_normed(prefix: str, space: str = RESIDUAL, /, **blocks: Block) -> Block:
    """Return blocks that each read the stream through a norm, by the norm's name."""
    return together(
        *(pre_norm(prefix + name, blocks[name], space=space) for name in blocks)
    )


def last_norm(module: str, space: str = RESIDUAL) -> Block:
    """Return the norm after the last layer.

    All weights without another norm read this norm.
    """
    return together(norm(module, space), Block(norms={module: ()}))


#: Why heads with ALiBi are not permuted.
_ORDERED = (
    "its heads keep their order, because the position biases (ALiBi) have a slope per "
    "head."
)


def attention(
    name: str,
    heads: Heads,
    projections: Projections,
    *,
    space: str = RESIDUAL,
    memory: str | None = None,
    order: str = "",
) -> Block:
    """Return one multi-head attention block.

    The heads of all modules are permuted together. For each key head, query and key
    share a rotation (or its subgroup under rotary positions); value and output share
    another rotation (Zhang et al. 2025, Eq. 5, 8-10; Verma & Elbayad 2024, section
    3.2).

    Args:
        name: prefix of the groups' names.
        space: the space that queries read and that the block writes.
        memory: the space that keys and values read; ``space`` if None.
        order: the group that permutes these heads if other blocks share their order;
            see ``shared_heads``.
    """
    dim = heads.dim
    keys = heads.key_count
    queries = (projections.query, *projections.queries)
    key_side = (projections.key, *projections.keys)

    def queried(low: int, high: int) -> list[Slot]:
        written = (x.written(heads.count, dim, low, high) for x in queries)
        return [slot for slots in written for slot in slots]

    def matched(low: int, high: int) -> tuple[Slot, ...]:
        slots = queried(low, high)
        # Contravariant to the queries: the scores, their products, stay the same.
        for projection in key_side:
            slots += projection.written(keys, dim, low, high, contravariant=True)
        return tuple(slots)

    heads_read = projections.output.read(heads.count * dim)
    value_output = (*projections.value.written(keys, dim), heads_read)
    permuted = "" if heads.ordered else order or f"{name}heads"
    groups: list[Group] = []

    def add(end: str, part: str, action: Action, slots: tuple[Slot, ...]) -> None:
        groups.append(Group(name + end, NO_LAYER, part, action, slots, permuted))

    if not order and not heads.ordered:
        slots = matched(0, dim) + value_output
        groups.append(Group(permuted, NO_LAYER, "heads", HeadPermutation(keys), slots))
    if keys < heads.count and not heads.ordered:
        action = QueryPermutation(keys, heads.count // keys)
        add("queries", "heads", action, (*queried(0, dim), heads_read))
    if heads.rotary:
        turned = RotarySigns if heads.normed else RotaryPhases
        phases = turned(keys, heads.rotary, heads.interleaved)
        add("qk", "attention", phases, matched(0, heads.rotary))
    # Under a norm with gains, no rotation of the units without positions is left.
    if heads.rotary < dim and not heads.normed:
        end = "qk.still" if heads.rotary else "qk"
        rotation = HeadRotation(keys, dim - heads.rotary)
        add(end, "attention", rotation, matched(heads.rotary, dim))
    add("vo", "attention", HeadRotation(keys, dim), value_output)
    query_axes = (x.between(None, space) for x in queries)
    attended = (*key_side, projections.value)
    memory_axes = (x.between(None, memory or space) for x in attended)
    axes = merged(*query_axes, *memory_axes, projections.output.between(space, None))
    biases = _redundant_biases(heads, projections, value_output)
    refused = {"heads": _ORDERED} if heads.ordered else {}
    return Block(tuple(groups), axes, biases, refused)


def _redundant_biases(
    heads: Heads, p: Projections, value_output: Sequence[Slot]
) -> tuple[RedundantBias, ...]:
    """Return the biases of an attention block that can be 0.

    They are the key biases that add one number to all scores of a query, and the
    values' bias. ``value_output`` are the values' units, and their place in the output.
    """
    dim = heads.dim
    keys = heads.key_count
    biases = []
    for key in p.keys if p.key_bias_seen else (p.key, *p.keys):
        if key.bias and heads.rotary < dim:
            _, bias = key.written(keys, dim, heads.rotary, dim)
            biases.append(RedundantBias(bias, keys))
    if p.value.bias and p.output.bias:
        _, bias, read_by = value_output
        biases.append(RedundantBias(bias, keys, read_by, p.output.bias_name))
    return tuple(biases)


def shared_heads(name: str, bias: str, blocks: Sequence[Block]) -> Block:
    """Return attention blocks whose heads share one order: they share a bias per head.

    Args:
        name: of the group that permutes the heads; the blocks were made with
            ``order=name``.
        bias: the relative-position bias ``[buckets, heads]`` that all blocks add.
    """
    whole = together(*blocks)
    inside = [
        group
        for group in whole.groups
        if group.part == "attention" and group.within == name
    ]
    if not (name and inside):
        return whole
    heads = inside[0].action.units
    slots = [slot for group in inside for slot in group.slots]
    slots.append(Slot(bias, 1, Slice(0, heads)))
    action = HeadPermutation(heads)
    permuted = Block((Group(name, NO_LAYER, "heads", action, tuple(slots)),))
    return together(permuted, whole, {bias: (None, None)})


def feed_forward(
    name: str,
    neurons: int,
    up: Units,
    down: Units,
    gate: Units | None = None,
    space: str = RESIDUAL,
) -> Block:
    """Return one feed-forward block with an elementwise activation.

    With a ``gate``, the activation is applied to the gate, and its units multiply those
    of ``up``. Units of up and down may then change their sign together.

    Source: Zhang et al. 2025, Eq. 6-7.
    """
    slots = up.written(1, neurons)
    reading = up.between(None, space)
    action = Permutation(neurons)
    if gate is not None:
        slots += gate.written(1, neurons, unsigned=True)
        reading = merged(reading, gate.between(None, space))
        action = SignedPermutation(neurons)
    group = Group(f"{name}ffn", NO_LAYER, "ffn", action, (*slots, down.read(neurons)))
    return Block((group,), merged(reading, down.between(space, None)))


def feed_forward_of(
    p: str, neurons: int, modules: str, bias: bool = True, space: str = RESIDUAL
) -> Block:
    """Return the feed-forward block of whole modules, by their names after a prefix.

    ``modules`` are up and down, such as ``fc1 fc2``, or up, down and gate.
    """
    up, down, *gates = units(p, modules, bias)
    return feed_forward(p, neurons, up, down, next(iter(gates), None), space)
