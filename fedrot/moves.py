"""Elements of groups applied to tensors, and to the statistics that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.matching.blocks import compute_dtype
from fedrot.symmetry.description import Group, Slot


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
        moved = self.group.kind.act(
            self.element, stretch.to(compute_dtype(tensor)), slot.axis, slot.contravariant
        ).to(tensor.dtype)
        if stretch.shape == tensor.shape:
            return moved.contiguous()
        out = tensor.detach().clone()
        slot.of(out).copy_(moved)
        return out


def apply_moves(tensors: Mapping[str, Tensor], moves: Iterable[Move]) -> dict[str, Tensor]:
    """Return a new dictionary with the moves applied in order; untouched tensors are shared."""
    out = dict(tensors)
    with torch.no_grad():
        for move in moves:
            for slot in move.group.slots:
                out[slot.tensor] = move.on(out[slot.tensor], slot)
    return out


def _gram(value: Tensor, slot: Slot, move: Move) -> Tensor:
    """``G -> T G T^T`` on the weight's input axis; inputs move contravariantly to the weight."""
    if slot.axis != 1:
        return value
    other = replace(slot, contravariant=not slot.contravariant)
    return move.on(move.on(value, replace(other, axis=0)), other)


def _fisher(value: Tensor, slot: Slot, move: Move) -> Tensor:
    """Move a diagonal in the shape of the weight, or refuse."""
    element = move.group.kind.on_fisher(move.element)
    if element is None:
        raise FedrotError(
            f"The diagonal Fisher of '{slot.tensor}' cannot follow the rotation '{move.group.name}': "
            "its diagonal alone does not determine the rotated one. Compute it after aligning, or "
            "align by permutations only, parts=('heads', 'ffn')."
        )
    return replace(move, element=element).on(value, slot)


_TRANSPORT: dict[str, Callable[[Tensor, Slot, Move], Tensor]] = {"gram": _gram, "fisher": _fisher}


def transport_statistics(
    statistics: Mapping[str, Mapping[str, Tensor]],
    moves: Iterable[Move],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, dict[str, Tensor]]:
    """Move statistics like the weights they belong to; see ``Alignment.transport``."""
    out: dict[str, dict[str, Tensor]] = {}
    for kind, by_name in statistics.items():
        if kind not in _TRANSPORT:
            raise FedrotError(f"Unknown statistics '{kind}'; known kinds: {', '.join(_TRANSPORT)}.")
        out[kind] = dict(by_name)
        for name in by_name:
            if name not in shapes:
                raise FedrotError(f"The {kind} statistics name '{name}', not a tensor of the model.")
    for move in moves:
        for slot in move.group.slots:
            for kind, by_name in out.items():
                if slot.tensor in by_name:
                    by_name[slot.tensor] = _TRANSPORT[kind](by_name[slot.tensor], slot, move)
    return out
