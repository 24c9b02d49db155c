"""The matrices that matching compares: one pair (anchor, client) per slot of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedrot.symmetry.description import Group, Slot

#: One slot of the anchor and of the client as matrices ``[size, rest]`` of the same dtype.
Pair = tuple[Tensor, Tensor]


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for float64 tensors, else float32: the dtype in which they are compared."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def pair(slot: Slot, anchor: Mapping[str, Tensor], client: Mapping[str, Tensor]) -> Pair:
    """Return one slot of both models; views of the models where dtype and layout allow it."""
    c = client[slot.tensor].detach()
    dtype = compute_dtype(c)
    return slot.rows(anchor[slot.tensor].detach(), dtype), slot.rows(c, dtype)


def pairs(group: Group, anchor: Mapping[str, Tensor], client: Mapping[str, Tensor]) -> list[Pair]:
    """Return the pairs of all slots of a group."""
    return [pair(slot, anchor, client) for slot in group.slots]


def squared_distance(blocks: Sequence[Pair]) -> float:
    """Return the sum of squared differences over all pairs."""
    return float(sum(torch.linalg.vector_norm(c - a).double() ** 2 for a, c in blocks))
