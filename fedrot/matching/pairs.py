"""Matrices that matching compares: one pair (anchor, client) per slot of a group, and distances."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fedrot.symmetry.actions import SignedPermutation
from fedrot.symmetry.describe.mixture import ExpertNeurons
from fedrot.symmetry.groups import Group, Slot
from fedrot.tensors import Tensors, compute_dtype

#: One slot of the anchor and of the client as matrices ``[size, rest]`` of the same dtype.
Pair = tuple[Tensor, Tensor]

#: Entries of a block of ``blocks_of``: 64 MiB in float32.
_BLOCK = 2**24

T = TypeVar("T")


def pairs(group: Group, anchor: Tensors, client: Tensors) -> list[Pair]:
    """Return the pairs of all slots of a group; views of the models where dtype and layout allow it."""
    return [_pair(slot, anchor, client) for slot in group.slots]


def _pair(slot: Slot, anchor: Tensors, client: Tensors) -> Pair:
    """Return the pair of one slot; views of the models where dtype and layout allow it."""
    a, c = anchor[slot.tensor].detach(), client[slot.tensor].detach()
    dtype = compute_dtype(c)
    return slot.rows(a, dtype), slot.rows(c, dtype)


def blocks_of(slot: Slot, anchor: Tensors, client: Tensors) -> Iterator[Pair]:
    """Yield the pair of one slot in blocks of columns, so that little of it is in memory in float32."""
    a, c = anchor[slot.tensor].detach(), client[slot.tensor].detach()
    dtype = compute_dtype(c)
    # Rows in the tensor's own dtype are a view: only blocks are converted.
    a, c = slot.rows(a, a.dtype), slot.rows(c, c.dtype)
    columns = max(1, _BLOCK // len(a))
    for ours, theirs in zip(a.split(columns, 1), c.split(columns, 1), strict=True):
        yield ours.to(dtype), theirs.to(dtype)


def by_sign(group: Group, blocks: Sequence[T]) -> tuple[list[T], list[T]]:
    """Split one item per slot into slots that keep their signs, and slots whose signs may change."""
    signed = isinstance(group.kind, SignedPermutation | ExpertNeurons)
    sides: tuple[list[T], list[T]] = ([], [])
    for slot, block in zip(group.slots, blocks, strict=True):
        sides[signed and not slot.unsigned].append(block)
    return sides


def distance_once(slots: Iterable[Slot], anchor: Tensors, client: Tensors) -> float:
    """Return the squared distance of all entries on the slots, each entry counted once."""
    return float(sum(_squares([pair]) for pair in entries_once(slots, anchor, client)))


def entries_once(slots: Iterable[Slot], anchor: Tensors, client: Tensors) -> Iterator[Pair]:
    """Yield all entries on the slots as pairs of blocks (anchor, client), each entry once."""
    for name, by_axis in _masks(slots, {name: tuple(t.shape) for name, t in client.items()}).items():
        c = client[name].detach()
        a, c = (t.to(compute_dtype(c)) for t in (anchor[name].detach(), c))
        if not any(bool(mask.all()) for mask in by_axis.values()):
            for axis, mask in by_axis.items():
                yield _where(a, mask, axis), _where(c, mask, axis)
                a, c = _where(a, ~mask, axis), _where(c, ~mask, axis)
            continue
        yield a, c


def count_once(slots: Iterable[Slot], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of entries on the slots, each entry counted once."""
    entries = 0
    for name, by_axis in _masks(slots, shapes).items():
        left = [n - int(by_axis[d].sum()) if d in by_axis else n for d, n in enumerate(shapes[name])]
        entries += math.prod(shapes[name]) - math.prod(left)
    return entries


def _masks(slots: Iterable[Slot], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[int, Tensor]]:
    """Return by tensor and axis which entries of the axis lie on a slot, bool ``[length]``."""
    masks: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for slot in slots:
        length = shapes[slot.tensor][slot.axis]
        mask = masks[slot.tensor].setdefault(slot.axis, torch.zeros(length, dtype=torch.bool))
        mask |= slot.slice.mask(length)
    return masks


def _where(tensor: Tensor, mask: Tensor, axis: int) -> Tensor:
    return tensor.index_select(axis, mask.nonzero()[:, 0].to(tensor.device))


def squared_distance(blocks: Sequence[Pair]) -> float:
    """Return the sum of squared differences over all pairs."""
    return float(_squares(blocks))


def _squares(blocks: Sequence[Pair]) -> Tensor:
    # A scalar on the pairs' device: the host waits only where it reads the value.
    squares = (torch.linalg.vector_norm(c - a).double() ** 2 for a, c in blocks)
    return sum(squares, start=torch.zeros((), dtype=torch.float64))
