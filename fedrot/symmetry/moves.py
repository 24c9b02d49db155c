"""``Move``, one element of one group, and the application of moves to tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.precision import full_float32
from fedrot.symmetry.groups import Group, Slot
from fedrot.tensors import Tensors, compute_dtype


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
        """Return a contiguous copy of a tensor with one slot moved, in the same dtype."""
        element = self.element.abs() if slot.unsigned else self.element
        part = slot.of(tensor.detach()).to(compute_dtype(tensor))
        moved = self.group.kind.act(element, part, slot.axis, slot.contravariant).to(tensor.dtype)
        if slot.size == tensor.shape[slot.axis]:
            return moved.contiguous()
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        slot.slice.write(out, slot.axis, moved)
        return out


@full_float32()
def apply_moves(tensors: Tensors, moves: Iterable[Move]) -> dict[str, Tensor]:
    """Return a new dictionary with the moves applied in order; untouched tensors are shared."""
    out = dict(tensors)
    with torch.no_grad():
        for move in moves:
            for slot in move.group.slots:
                out[slot.tensor] = move.on(out[slot.tensor], slot)
    return out
