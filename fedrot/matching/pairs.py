"""Slots of an anchor and of a client as pairs of matrices, and their distances."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fedrot.matching.assignment import summed
from fedrot.symmetry.actions import Action
from fedrot.symmetry.describe.mixture import ExpertNeurons
from fedrot.symmetry.groups import Group, Slot
from fedrot.symmetry.signs import SignedPermutation
from fedrot.tensors import Tensors, compute_dtype

#: One slot of the anchor and of the client as matrices ``[size, rest]`` of the same
#: dtype.
Pair = tuple[Tensor, Tensor]
Pairs = Sequence[Pair]

#: By tensor and axis, which entries are on a slot, bool ``[length]``.
Masks = dict[str, dict[int, Tensor]]

#: Number of entries in a block of ``blocks_of``: 64 MiB in float32.
_BLOCK = 2**24

T = TypeVar("T")


def pairs(
    group: Group,
    anchor: Tensors,
    client: Tensors,
) -> list[Pair]:
    """Return the pairs of all slots of a group, as views of the models if possible."""
    matrices = []
    for slot in group.slots:
        a = anchor[slot.tensor].detach()
        c = client[slot.tensor].detach()
        dtype = compute_dtype(c)
        matrices.append((slot.rows(a, dtype), slot.rows(c, dtype)))
    return matrices


def blocks_of(
    slot: Slot,
    anchor: Tensors,
    client: Tensors,
) -> Iterator[Pair]:
    """Yield the pair of one slot in blocks of columns.

    Only one block is in memory in float32.
    """
    c = client[slot.tensor].detach()
    dtype = compute_dtype(c)
    # Rows in the tensor's dtype are a view: only blocks are converted.
    rows = slot.rows(c, c.dtype)
    columns = max(1, _BLOCK // len(rows))
    a = anchor[slot.tensor].detach()
    anchors = slot.rows(a, a.dtype).split(columns, 1)
    for block, other in zip(anchors, rows.split(columns, 1), strict=True):
        yield block.to(dtype), other.to(dtype)


def by_sign(
    group: Group,
    items: Sequence[T],
) -> tuple[list[T], list[T]]:
    """Split one item per slot into slots that keep their signs, and others.

    The signs of the others may change.
    """
    turns = isinstance(group.action, SignedPermutation | ExpertNeurons)
    plain: list[T] = []
    signed: list[T] = []
    for slot, item in zip(group.slots, items, strict=True):
        side = signed if turns and not slot.unsigned else plain
        side.append(item)
    return plain, signed


def squared_distance(blocks: Iterable[Pair]) -> Tensor:
    """Return the sum of squared differences over all pairs, float64 ``[]``.

    It stays on the pairs' device: the CPU waits only when its value is read.
    """
    distances = (torch.linalg.vector_norm(c - a) for a, c in blocks)
    return summed(distance.double() ** 2 for distance in distances)


def moved_pairs(
    action: Action,
    element: Tensor,
    blocks: Pairs,
) -> list[Pair]:
    """Return the pairs after an element has moved the client's rows."""
    return [(a, action.act(element, c, 0)) for a, c in blocks]


def norms(blocks: Iterable[Pair]) -> Tensor:
    """Return the norm of each matrix, float64 ``[pairs, 2]``: anchor and client."""
    sizes = [torch.linalg.vector_norm(matrix) for pair in blocks for matrix in pair]
    return torch.stack(sizes).double().view(-1, 2)


def entries_once(
    slots: Iterable[Slot],
    anchor: Tensors,
    client: Tensors,
) -> Iterator[Pair]:
    """Yield all entries on the slots as pairs of blocks, each entry once."""
    for name, by_axis in _masks(slots, client).items():
        c = client[name].detach()
        dtype = compute_dtype(c)
        a = anchor[name].detach().to(dtype)
        c = c.to(dtype)
        if any(mask.all() for mask in by_axis.values()):
            yield a, c
            continue
        for axis, mask in by_axis.items():
            yield _where(a, mask, axis), _where(c, mask, axis)
            # Entries on this axis are done: other axes count only what is left.
            a = _where(a, ~mask, axis)
            c = _where(c, ~mask, axis)


def count_once(
    slots: Iterable[Slot],
    tensors: Tensors,
) -> int:
    """Return the number of entries on the slots, each entry counted once."""
    entries = 0
    for name, by_axis in _masks(slots, tensors).items():
        shape = tensors[name].shape
        left = list(shape)
        for axis, mask in by_axis.items():
            left[axis] -= int(mask.sum())
        entries += math.prod(shape) - math.prod(left)
    return entries


def covered(
    groups: Iterable[Group],
    tensors: Tensors,
) -> set[str]:
    """Return the names of the tensors of which every entry is on a slot of a group."""
    slots = defaultdict[str, list[Slot]](list)
    for group in groups:
        for slot in group.slots:
            slots[slot.tensor].append(slot)
    return {
        name
        for name, on_it in slots.items()
        if count_once(on_it, tensors) == math.prod(tensors[name].shape)
    }


def _masks(
    slots: Iterable[Slot],
    tensors: Tensors,
) -> Masks:
    """Return masks of the entries on any of the slots."""
    masks: Masks = defaultdict(dict)
    for slot in slots:
        mask = slot.slice.mask(tensors[slot.tensor].shape[slot.axis])
        by_axis = masks[slot.tensor]
        if slot.axis in by_axis:
            mask = mask | by_axis[slot.axis]
        by_axis[slot.axis] = mask
    return masks


def _where(
    tensor: Tensor,
    mask: Tensor,
    axis: int,
) -> Tensor:
    index = mask.nonzero()[:, 0].to(tensor.device)
    return tensor.index_select(axis, index)
