"""The usual blocks of a transformer layer: their groups, and what they read and write.

A family lists the names of its modules and calls these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fedrot.symmetry.actions import (
    HeadPermutation,
    HeadRotation,
    Permutation,
    QueryPermutation,
    Rescale,
    RotaryPhases,
    RotarySigns,
    SignedPermutation,
)
from fedrot.symmetry.expert_actions import ExpertNeurons, ExpertPermutation
from fedrot.symmetry.groups import NO_LAYER, Group, RedundantBias, Slice, Slot
from fedrot.symmetry.spaces import RESIDUAL, Axes, merged


@dataclass(frozen=True)
class Block:
    """A part of a model: the groups inside it, the spaces on its tensors' axes, its redundant biases,
    and the parts that cannot be moved there, with the reason."""

    groups: tuple[Group, ...] = ()
    axes: Axes = field(default_factory=dict)
    redundant_biases: tuple[RedundantBias, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


def together(*parts: Block | Axes) -> Block:
    """Return several parts as one; axes alone are a part without groups."""
    whole = [part if isinstance(part, Block) else Block(axes=part) for part in parts]
    groups = tuple(group for part in whole for group in part.groups)
    redundant_biases = tuple(redundant for part in whole for redundant in part.redundant_biases)
    refused = {name: reason for part in whole for name, reason in part.refused.items()}
    return Block(groups, merged(*(part.axes for part in whole)), redundant_biases, refused)


@dataclass(frozen=True)
class Units:
    """Where the units of a projection lie in a module.

    Attributes:
        module: of its ``weight`` and, if ``bias``, its ``bias``.
        bias: whether there is one, or the name of the parameter that serves as one, which holds these
            units alone.
        start: of the first unit among the module's outputs.
        every: fused projections that keep the units of each head side by side have a head's units in
            every stretch of so many outputs, ``start`` after its beginning.
        heads: how many heads each of these stretches holds, of which whole heads alone are moved.
        conv1d: whether the weight is ``[in, out]``, as GPT-2's.
    """

    module: str
    bias: bool | str = True
    start: int = 0
    every: int = 0
    heads: int = 1
    conv1d: bool = False

    @property
    def weight(self) -> str:
        return f"{self.module}.weight"

    def written(
        self,
        heads: int,
        dim: int,
        low: int = 0,
        high: int | None = None,
        contravariant: bool = False,
        unsigned: bool = False,
    ) -> list[Slot]:
        """Return where units ``low`` to ``high`` of ``heads`` heads of ``dim`` units are written.

        Rows of the weight, and entries of the bias.
        """
        high = dim if high is None else high
        blocks = (dim, low, high) if high - low < dim else ()
        stretch = Slice(self.start, self.start + heads * dim, *blocks)
        if self.every:
            end = self.start + (self.heads - 1) * dim + high
            stretch = Slice(0, heads // self.heads * self.every, self.every, self.start + low, end)
        weight = Slot(self.weight, 1 if self.conv1d else 0, stretch, contravariant, unsigned)
        if isinstance(self.bias, str):
            own = Slice(0, heads * dim, *blocks)
            return [weight, replace(weight, tensor=self.bias, axis=0, slice=own)]
        return [weight, replace(weight, tensor=self.bias_name, axis=0)] if self.bias else [weight]

    def read(self, size: int) -> Slot:
        """Return where the module reads ``size`` inputs."""
        return Slot(self.weight, 0 if self.conv1d else 1, Slice(0, size), contravariant=True)

    @property
    def bias_name(self) -> str:
        """The name of its bias, empty if it has none."""
        if isinstance(self.bias, str):
            return self.bias
        return f"{self.module}.bias" if self.bias else ""

    def between(self, out: str | None, into: str | None) -> Axes:
        """Return the axes of the module, which reads the space ``into`` and writes ``out``."""
        weight = {self.weight: (into, out) if self.conv1d else (out, into)}
        return merged(weight, {self.bias_name: (out,)} if self.bias else {})


@dataclass(frozen=True)
class Heads:
    """The heads of an attention block.

    Attributes:
        count: query heads.
        dim: units of each.
        keys: key and value heads, each shared by ``count / keys`` consecutive query heads; 0 is as
            many as query heads.
        rotary: units of each head that rotary positions turn, the first ones.
        normed: whether queries and keys pass a norm with gains before they are turned.
        interleaved: whether a rotary frequency turns neighbours, units ``2 f`` and ``2 f + 1``.
        alibi: whether each head has a slope of its own, so that heads keep their order.
    """

    count: int
    dim: int
    keys: int = 0
    rotary: int = 0
    normed: bool = False
    interleaved: bool = False
    alibi: bool = False


_ALIBI = "its heads have different slopes of ALiBi, so that they keep their order."


def attention(
    name: str,
    layer: int,
    heads: Heads,
    query: Units,
    key: Units,
    value: Units,
    output: Units,
    *,
    queries: Iterable[Units] = (),
    keys: Iterable[Units] = (),
    space: str = RESIDUAL,
    memory: str | None = None,
    order: str | None = None,
    key_bias_seen: bool = False,
) -> Block:
    """Return one multi-head attention block.

    The heads of all modules are permuted together; query and key share one rotation (or what rotary
    positions leave of it) and one scale per key head, value and output another (Zhang et al. 2025,
    Eq. 5, 8-11; Verma & Elbayad 2024, section 3.2).

    Args:
        name: begins the names of the groups.
        queries: further projections into the queries' coordinates (of relative positions).
        keys: further projections into the keys' coordinates.
        space: what queries are computed from, and what the block writes to.
        memory: what keys and values are computed from; ``space`` if None.
        order: the group that permutes these heads, if they are not free: see ``shared_heads``.
        key_bias_seen: whether the bias of ``key`` adds different amounts to the scores of one softmax
            (where positions have queries); under rotary positions it does in any case.
    """
    kv = heads.keys or heads.count
    query_side, key_side = (query, *queries), (key, *keys)

    def inside(low: int, high: int) -> tuple[Slot, ...]:
        # The key undoes what the query does.
        return (
            *(s for u in query_side for s in u.written(heads.count, heads.dim, low, high)),
            *(s for u in key_side for s in u.written(kv, heads.dim, low, high, contravariant=True)),
        )

    query_key = inside(0, heads.dim)
    read = output.read(heads.count * heads.dim)
    value_output = (*value.written(kv, heads.dim), read)
    own = "" if heads.alibi else order or f"{name}heads"
    groups = []
    if order is None and own:
        groups.append(Group(own, layer, "heads", HeadPermutation(kv), query_key + value_output))
    if kv < heads.count and own:
        kind = QueryPermutation(kv, heads.count // kv)
        slots = tuple(s for u in query_side for s in u.written(heads.count, heads.dim))
        groups.append(Group(f"{name}queries", layer, "heads", kind, (*slots, read), own))
    if heads.rotary:
        rotary = RotarySigns if heads.normed else RotaryPhases
        turned = rotary(kv, heads.rotary, heads.interleaved)
        groups.append(Group(f"{name}qk", layer, "attention", turned, inside(0, heads.rotary), own))
    if heads.rotary < heads.dim and not heads.normed:
        kind_ = HeadRotation(kv, heads.dim - heads.rotary)
        rest = f"{name}qk.still" if heads.rotary else f"{name}qk"
        groups.append(Group(rest, layer, "attention", kind_, inside(heads.rotary, heads.dim), own))
    rotation, scale = HeadRotation(kv, heads.dim), Rescale(kv)
    groups.append(Group(f"{name}vo", layer, "attention", rotation, value_output, own))
    if not heads.normed:
        groups.append(Group(f"{name}qk.scale", layer, "rescale", scale, query_key, own))
    groups.append(Group(f"{name}vo.scale", layer, "rescale", scale, value_output, own))
    # What is not turned adds the same to all scores of a query.
    unseen = keys if key_bias_seen else key_side
    redundant_biases = [
        RedundantBias(unit.written(kv, heads.dim, heads.rotary, heads.dim)[1], kv)
        for unit in unseen
        if unit.bias and heads.rotary < heads.dim
    ]
    if value.bias and output.bias:
        redundant_biases.append(
            RedundantBias(value.written(kv, heads.dim)[1], kv, read, output.bias_name)
        )
    return Block(
        tuple(groups),
        merged(
            *(unit.between(None, space) for unit in query_side),
            *(unit.between(None, memory or space) for unit in (*key_side, value)),
            output.between(space, None),
        ),
        tuple(redundant_biases),
        {} if own else {"heads": _ALIBI},
    )


def shared_heads(name: str, heads: int, bias: str, blocks: Iterable[Block]) -> Block:
    """Return attention blocks whose heads share one order, because they share a bias per head.

    Args:
        name: of the group of the heads' order; the blocks were made with ``order=name``.
        bias: the relative-position bias ``[buckets, heads]`` that all blocks add.
        blocks: the blocks.
    """
    parts = tuple(blocks)
    inside = [g for part in parts for g in part.groups if g.part == "attention" and g.within == name]
    slots = [slot for group in inside for slot in group.slots]
    group = Group(
        name, NO_LAYER, "heads", HeadPermutation(heads), (*slots, Slot(bias, 1, Slice(0, heads)))
    )
    return together(Block((group,)), *parts, {bias: (None, None)})


def feed_forward(
    name: str,
    layer: int,
    neurons: int,
    up: Units,
    down: Units,
    gate: Units | None = None,
    space: str = RESIDUAL,
) -> Block:
    """Return one feed-forward block with an elementwise activation (Zhang et al. 2025, Eq. 6-7).

    With a ``gate``, the activation is on the gate, whose units multiply those of ``up``: up and down
    may change their sign together.
    """
    units = up.written(1, neurons)
    if gate is not None:
        units += gate.written(1, neurons, unsigned=True)
    kind = Permutation(neurons) if gate is None else SignedPermutation(neurons)
    group = Group(f"{name}ffn", layer, "ffn", kind, (*units, down.read(neurons)))
    read = [unit.between(None, space) for unit in (up, gate) if unit is not None]
    return Block((group,), merged(*read, down.between(space, None)))


def mixture(
    name: str, layer: int, experts: int, neurons: int, router: str, gate_up: str, down: str
) -> Block:
    """Return a mixture of gated experts (Shazeer et al. 2017; Jiang et al. 2024).

    Experts change their order together with the router's rows; the neurons of each change their order and
    sign among themselves.

    Args:
        name: begins the names of the groups.
        layer: of the groups.
        experts: how many there are.
        neurons: of each expert.
        router: the weight ``[experts, in]``.
        gate_up: the parameter ``[experts, 2 * neurons, in]``, rows of the gate first.
        down: the parameter ``[experts, out, neurons]``.
    """
    every, inner, second = Slice(0, experts), Slice(0, neurons), Slice(neurons, 2 * neurons)
    order = Group(
        f"{name}experts",
        layer,
        "ffn",
        ExpertPermutation(experts),
        tuple(Slot(tensor, 0, every) for tensor in (router, gate_up, down)),
    )
    units = (
        Slot(gate_up, 1, inner, unsigned=True, experts=True),
        Slot(gate_up, 1, second, experts=True),
        Slot(down, 2, inner, contravariant=True, experts=True),
    )
    inside = Group(f"{name}ffn", layer, "ffn", ExpertNeurons(experts, neurons), units, order.name)
    axes = {
        router: (None, RESIDUAL),
        gate_up: (None, None, RESIDUAL),
        down: (None, RESIDUAL, None),
    }
    return Block((order, inside), axes)
