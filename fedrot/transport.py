"""Elements of groups applied to tensors, and to the statistics that belong to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fedrot.errors import FedrotError
from fedrot.precision import full_float32
from fedrot.symmetry.actions import HeadRotation
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


def _gram(value: Tensor, slot: Slot, move: Move, axis: int = 1) -> Tensor:
    """Move the Gram matrix of the inputs that the weight's ``axis`` reads, in the form it has.

    Inputs move contravariantly to the weight: ``G -> T G T^T``. Blocks ``[heads, d, d]`` stand for a
    block-diagonal matrix, ``[n]`` for a diagonal one.
    """
    if slot.axis != axis:
        return value
    on_rows = replace(slot, axis=0)
    if value.ndim == 1:
        return _square(value, on_rows, move, "diagonal of the Gram matrix", "Send the form 'heads'.")
    other = replace(on_rows, contravariant=not slot.contravariant)
    if value.ndim == 3:
        _check_blocks(value, slot, move)
    full = torch.block_diag(*value) if value.ndim == 3 else value
    moved = move.on(move.on(full, other), replace(other, axis=1))
    if value.ndim == 2:
        return moved
    size = value.shape[-1]
    stretches = range(0, len(full), size)
    return torch.stack([moved[i : i + size, i : i + size] for i in stretches])


def _check_blocks(value: Tensor, slot: Slot, move: Move) -> None:
    """Refuse to move blocks by what leads out of them."""
    kind, (blocks, size, _) = move.group.kind, value.shape
    inside = isinstance(kind, HeadRotation) and kind.dim == size
    whole = not isinstance(kind, HeadRotation) and blocks % kind.units == 0
    if not (inside or whole):
        raise FedrotError(
            f"The {blocks} blocks of the Gram matrix of '{slot.tensor}' cannot follow "
            f"'{move.group.name}', which mixes them. Send the form 'full'."
        )


def _gradient(value: Tensor, slot: Slot, move: Move) -> Tensor:
    """Move what a gradient is, in the shape of the weight: inversely to the weight."""
    return move.on(value, replace(slot, contravariant=not slot.contravariant))


def _square(value: Tensor, slot: Slot, move: Move, what: str, instead: str) -> Tensor:
    """Move squares of single coordinates, or refuse."""
    element = move.group.kind.on_fisher(move.element)
    if element is None:
        raise FedrotError(
            f"The {what} of '{slot.tensor}' cannot follow the rotation '{move.group.name}': a diagonal "
            f"alone does not determine the rotated one. {instead}"
        )
    return replace(move, element=element).on(value, slot)


_AFTER = "Compute it after aligning, or align by permutations only, parts=('heads', 'ffn')."


def _trained(value: Tensor, slot: Slot, move: Move) -> Tensor:
    """Move the mask of the rows of a tensor that a client trained."""
    uniform = value.ndim == 0 or bool(value.all()) or not bool(value.any())
    if uniform or slot.axis != 0:
        return value
    return _square(value, slot, move, "mask of trained rows", "Mark all of its rows or none.")


_TRANSPORT: dict[str, Callable[[Tensor, Slot, Move], Tensor]] = {
    "gram": _gram,
    "gram_conv1d": partial(_gram, axis=0),
    "fisher": partial(_square, what="diagonal Fisher", instead=_AFTER),
    "exp_avg": _gradient,
    "exp_avg_sq": partial(_square, what="second moment", instead=_AFTER),
    "trained": _trained,
}


@full_float32()
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
        for kind, by_name in out.items():
            # Layers that read one input share its Gram matrix, and go on sharing it.
            shared: dict[tuple[int, Slot], Tensor] = {}
            before = dict(by_name)  # keeps them alive, so that ids are not used twice
            for slot in move.group.slots:
                if slot.tensor not in by_name:
                    continue
                value = by_name[slot.tensor]
                key = (id(value), replace(slot, tensor=""))
                if value is not before[slot.tensor] or key not in shared:
                    shared[key] = _TRANSPORT[kind](value, slot, move)
                by_name[slot.tensor] = shared[key]
    return out
