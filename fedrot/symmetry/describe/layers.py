"""The usual blocks of a transformer layer: their groups, and the spaces that they read
and write.

A family calls these functions with the names of its modules. The ``Stack`` that
contains a layer sets the layer number of its groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedrot.symmetry.actions import (
    Action,
    HeadPermutation,
    HeadRotation,
    Permutation,
    QueryPermutation,
)
from fedrot.symmetry.describe.projections import Heads, Projections, Units
from fedrot.symmetry.describe.spaces import RESIDUAL, Axes, merged, norm, read
from fedrot.symmetry.groups import NO_LAYER, Group, RedundantBias, Slice, Slot
from fedrot.symmetry.rotary_actions import RotaryPhases, RotarySigns
from fedrot.symmetry.signs import SignedPermutation


@dataclass(frozen=True)
class Block:
    """A piece of a model: its groups, the spaces on its tensors' axes, and its
    redundant biases.

    ``refused`` holds the parts that cannot be moved because of this block, with the
    reason. ``norms`` holds, by norm, the weights that read the norm, see ``pre_norm``
    and ``last_norm``.
    """

    groups: tuple[Group, ...] = ()
    axes: Axes = field(default_factory=dict)
    redundant_biases: tuple[RedundantBias, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def axes_of(item: Block | Axes) -> Axes:
    """Return the axes of a block; axes are returned as they are."""
    return item.axes if isinstance(item, Block) else item


def together(*blocks: Block | Axes) -> Block:
    """Return several blocks as one; axes are a block without groups."""
    found = [
        block if isinstance(block, Block) else Block(axes=block) for block in blocks
    ]
    norms: dict[str, tuple[str, ...]] = {}
    for module, weights in (item for block in found for item in block.norms.items()):
        norms[module] = norms.get(module, ()) + weights
    return Block(
        tuple(group for block in found for group in block.groups),
        merged(*(block.axes for block in found)),
        tuple(redundant for block in found for redundant in block.redundant_biases),
        {part: reason for block in found for part, reason in block.refused.items()},
        norms,
    )


def pre_norm(
    module: str, *blocks: Block, space: str = RESIDUAL, memory: Sequence[str] = ()
) -> Block:
    """Return blocks that read the stream only through a norm: ``x + block(norm(x))``.

    ``memory`` are the blocks' weights that read another norm's output.
    """
    inside = together(*blocks)
    readers = (name for name, axes in inside.axes.items() if read(space) in axes)
    found = {module: tuple(name for name in readers if name not in memory)}
    return together(norm(module, space), inside, Block(norms=found))


def last_norm(module: str, space: str = RESIDUAL) -> Block:
    """Return the norm after the last layer; all weights without another norm read this
    norm.
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
    p, kv, dim = projections, heads.keys or heads.count, heads.dim
    query_side, key_side = (p.query, *p.queries), (p.key, *p.keys)

    def matched(low: int, high: int) -> tuple[Slot, ...]:
        """Return units of queries and keys; keys are contravariant to queries."""
        return (
            *(s for u in query_side for s in u.written(heads.count, dim, low, high)),
            *(
                s
                for u in key_side
                for s in u.written(kv, dim, low, high, contravariant=True)
            ),
        )

    query_key, heads_read = matched(0, dim), p.output.read(heads.count * dim)
    value_output = (*p.value.written(kv, dim), heads_read)
    own = "" if heads.ordered else order or f"{name}heads"
    inside: list[tuple[str, str, Action, tuple[Slot, ...]]] = []
    if kv < heads.count and not heads.ordered:
        slots = tuple(s for u in query_side for s in u.written(heads.count, dim))
        queries = QueryPermutation(kv, heads.count // kv)
        inside.append(("queries", "heads", queries, (*slots, heads_read)))
    if heads.rotary:
        turned = RotarySigns if heads.normed else RotaryPhases
        action = turned(kv, heads.rotary, heads.interleaved)
        inside.append(("qk", "attention", action, matched(0, heads.rotary)))
    if heads.rotary < dim and not heads.normed:
        still = matched(heads.rotary, dim)
        suffix = "qk.still" if heads.rotary else "qk"
        inside.append(
            (suffix, "attention", HeadRotation(kv, dim - heads.rotary), still)
        )
    inside.append(("vo", "attention", HeadRotation(kv, dim), value_output))
    groups = [
        Group(f"{name}{end}", NO_LAYER, part, action, slots, own)
        for end, part, action, slots in inside
    ]
    if not order and not heads.ordered:
        permuted = Group(
            own, NO_LAYER, "heads", HeadPermutation(kv), query_key + value_output
        )
        groups.insert(0, permuted)
    return Block(
        tuple(groups),
        merged(
            *(unit.between(None, space) for unit in query_side),
            *(unit.between(None, memory or space) for unit in (*key_side, p.value)),
            p.output.between(space, None),
        ),
        _redundant_biases(heads, p),
        {"heads": _ORDERED} if heads.ordered else {},
    )


def _redundant_biases(heads: Heads, p: Projections) -> tuple[RedundantBias, ...]:
    """Return the key biases that add one number to all scores of a query, and the
    values' bias.
    """
    kv, dim = heads.keys or heads.count, heads.dim
    found = [
        RedundantBias(unit.written(kv, dim, heads.rotary, dim)[1], kv)
        for unit in (p.keys if p.key_bias_seen else (p.key, *p.keys))
        if unit.bias and heads.rotary < dim
    ]
    if p.value.bias and p.output.bias:
        inputs = p.output.read(heads.count * dim)
        found.append(
            RedundantBias(p.value.written(kv, dim)[1], kv, inputs, p.output.bias_name)
        )
    return tuple(found)


def shared_heads(name: str, bias: str, blocks: Sequence[Block]) -> Block:
    """Return attention blocks whose heads share one order, because the blocks share a
    bias per head.

    Args:
        name: of the group that permutes the heads; the blocks were made with
            ``order=name``.
        bias: the relative-position bias ``[buckets, heads]`` that all blocks add.
    """
    inside = [
        g
        for block in blocks
        for g in block.groups
        if g.part == "attention" and g.within == name
    ]
    if not (name and inside):
        return together(*blocks)
    heads = inside[0].action.units
    slots = (
        *(slot for group in inside for slot in group.slots),
        Slot(bias, 1, Slice(0, heads)),
    )
    group = Group(name, NO_LAYER, "heads", HeadPermutation(heads), slots)
    return together(Block((group,)), *blocks, {bias: (None, None)})


def feed_forward(
    name: str,
    neurons: int,
    up: Units,
    down: Units,
    gate: Units | None = None,
    space: str = RESIDUAL,
) -> Block:
    """Return one feed-forward block with an elementwise activation (Zhang et al. 2025,
    Eq. 6-7).

    With a ``gate``, the activation is applied to the gate, and its units multiply those
    of ``up``. Units of up and down may then change their sign together.
    """
    units = up.written(1, neurons)
    if gate is not None:
        units += gate.written(1, neurons, unsigned=True)
    action = Permutation(neurons) if gate is None else SignedPermutation(neurons)
    group = Group(f"{name}ffn", NO_LAYER, "ffn", action, (*units, down.read(neurons)))
    readers = [unit.between(None, space) for unit in (up, gate) if unit is not None]
    return Block((group,), merged(*readers, down.between(space, None)))
