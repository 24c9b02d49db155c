"""``Move``, one element of one group, and how moves act on tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.precision import full_float32
from fedrot.symmetry.groups import Group, Slot
from fedrot.tensors import compute_dtype


@dataclass(frozen=True)
class Move:
    """One element of one group."""

    group: Group
    element: Tensor

    @property
    def inverse(self) -> Move:
        """The move that undoes this one."""
        return Move(self.group, self.group.kind.inverse(self.element))

    def on(self, tensor: Tensor, slot: Slot) -> Tensor:
        """Return ``tensor`` with one slot moved, same dtype, contiguous; the input is unchanged."""
        stretch = slot.of(tensor.detach())
        element = self.element.abs() if slot.unsigned else self.element
        moved = self.group.kind.act(
            element, stretch.to(compute_dtype(tensor)), slot.axis, slot.contravariant
        ).to(tensor.dtype)
        if slot.size == tensor.shape[slot.axis]:
            return moved.contiguous()
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        slot.slice.write(out, slot.axis, moved)
        return out


@full_float32()
def apply_moves(tensors: Mapping[str, Tensor], moves: Iterable[Move]) -> dict[str, Tensor]:
    """Return a new dictionary with the moves applied in order; untouched tensors are shared."""
    out = dict(tensors)
    with torch.no_grad():
        for move in moves:
            for slot in move.group.slots:
                out[slot.tensor] = move.on(out[slot.tensor], slot)
    return out
