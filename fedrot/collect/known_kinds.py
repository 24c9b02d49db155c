"""The statistic kinds of fedrot: Gram matrices, Fisher information, Adam's moments, trained rows.

``check`` functions return a problem, or None; ``move`` functions return the value that belongs to the
moved weight (see ``StatisticKind``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedrot.collect.fisher import collect_fisher
from fedrot.collect.gram import collect_gram
from fedrot.collect.statistic_kinds import FISHER, GRAMS, STATISTIC_KINDS, TRAINED, Shape, StatisticKind
from fedrot.errors import FedrotError
from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.groups import Slot
from fedrot.symmetry.moves import Move
from fedrot.tensors import compute_dtype, diagonal_blocks

#: Rounding to bfloat16 changes a matrix by less than this share of its Frobenius norm.
_ROUNDING = 2**-8
#: Moving a matrix in float32 changes entries by less than this share of the largest.
_MOVING = 2**-14


def _check_gram(value: Tensor, shape: Shape, axis: int) -> str | None:
    if len(shape) != 2:
        return "belong to no matrix, so that no layer reads an input with it"
    inputs = shape[axis]
    blocks = max(value.shape[0], 1) if value.ndim == 3 else 1
    sizes = {1: (inputs,), 2: (inputs, inputs), 3: (blocks, inputs // blocks, inputs // blocks)}
    if tuple(value.shape) != sizes.get(value.ndim) or (value.ndim == 3 and inputs % blocks):
        return (
            f"have shape {list(value.shape)}, but the layer reads {inputs} inputs; send [in, in], "
            "[heads, in / heads, in / heads] or [in]"
        )
    matrices = value.detach().to(compute_dtype(value))
    diagonal = matrices if value.ndim == 1 else matrices.diagonal(dim1=-2, dim2=-1)
    negative = "have negative eigenvalues; a Gram matrix is X^T X"
    if bool((diagonal < 0).any()):
        return "are negative" if value.ndim == 1 else negative
    if value.ndim == 1 or not bool(matrices.any()):
        return None
    # As in RegMean the diagonal is scaled to 1: else one large entry would hide all others. What is
    # lost to the smallest numbers of the dtype is no entry.
    largest = matrices.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(matrices.dtype).tiny)
    scale = (diagonal / largest[..., 0] + _MOVING).rsqrt()
    even = matrices / largest * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    slack = _ROUNDING * torch.linalg.vector_norm(even, dim=(-2, -1), keepdim=True) + _ROUNDING**2
    if bool(((even - even.mT).abs() > slack).any()):
        return "are not symmetric; a Gram matrix is X^T X"
    # Rounding may have made a small eigenvalue negative: the largest rounding error is allowed for.
    eye = torch.eye(even.shape[-1], dtype=even.dtype, device=even.device)
    _, failed = torch.linalg.cholesky_ex(even + slack * eye)
    return negative if bool(failed.any()) else None


def _move_gram(value: Tensor, slot: Slot, move: Move, axis: int) -> Tensor:
    """Move the Gram matrix of the inputs that the weight's ``axis`` reads, in the form it has.

    Inputs move contravariantly to the weight: ``G -> T G T^T``. Blocks ``[heads, d, d]`` are a
    block-diagonal matrix, ``[n]`` a diagonal one.
    """
    if slot.axis != axis:
        return value
    on_rows = replace(slot, axis=0)
    if value.ndim == 1:
        return _move_squares(
            value, on_rows, move, "diagonal of the Gram matrix", "Send the form 'heads'."
        )
    other = replace(on_rows, contravariant=not slot.contravariant)
    if value.ndim == 3:
        _check_blocks(value, slot, move)
    full = torch.block_diag(*value) if value.ndim == 3 else value
    moved = move.on(move.on(full, other), replace(other, axis=1))
    if value.ndim == 2:
        return moved
    return diagonal_blocks(moved, value.shape[-1])


def _check_blocks(value: Tensor, slot: Slot, move: Move) -> None:
    """Raise ``FedrotError`` if a move would fill entries outside of the blocks."""
    kind, (blocks, size, _) = move.group.kind, value.shape
    inside = isinstance(kind, HeadRotation) and kind.dim == size
    whole = not isinstance(kind, HeadRotation) and blocks % kind.units == 0
    if not (inside or whole):
        raise FedrotError(
            f"The {blocks} blocks of the Gram matrix of '{slot.tensor}' cannot follow "
            f"'{move.group.name}', which mixes them. Send the form 'full'."
        )


def _check_shape(value: Tensor, shape: Shape) -> str | None:
    fits = tuple(value.shape) == shape
    return None if fits else f"have shape {list(value.shape)}, the tensor has {list(shape)}"


def _check_squares(value: Tensor, shape: Shape) -> str | None:
    negative = bool((value < 0).any())
    return _check_shape(value, shape) or (
        "are negative; they are means of squares" if negative else None
    )


def _move_gradient(value: Tensor, slot: Slot, move: Move) -> Tensor:
    """Move a gradient: inversely to its weight."""
    return move.on(value, replace(slot, contravariant=not slot.contravariant))


def _move_squares(value: Tensor, slot: Slot, move: Move, what: str, instead: str) -> Tensor:
    """Move squares of a gradient's coordinates: they follow permutations, signs and scales."""
    element = move.group.kind.on_fisher(move.element)
    if element is None:
        raise FedrotError(
            f"The {what} of '{slot.tensor}' cannot follow the rotation '{move.group.name}': a diagonal "
            f"alone does not determine the rotated one. {instead}"
        )
    return replace(move, element=element).on(value, slot)


_AFTER = "Compute it after aligning, or align by permutations only, parts=('heads', 'ffn')."


def _check_trained(value: Tensor, shape: Shape) -> str | None:
    if value.dtype != torch.bool:
        return f"are {value.dtype}; a mask is boolean"
    if tuple(value.shape) not in ((), shape[:1]):
        rows = shape[0] if shape else 0
        return f"have shape {list(value.shape)}, but the tensor has {rows} rows"
    return None


def _move_trained(value: Tensor, slot: Slot, move: Move) -> Tensor:
    uniform = value.ndim == 0 or bool(value.all()) or not bool(value.any())
    if uniform or slot.axis != 0:
        return value
    return _move_squares(value, slot, move, "mask of trained rows", "Mark all of its rows or none.")


_GRAMS = (
    StatisticKind(
        name,
        check=partial(_check_gram, axis=axis),
        move=partial(_move_gram, axis=axis),
        meaning=f"Gram matrix `X^T X / n` of the inputs `X`, which axis {axis} of the weight reads",
        # The matrices of Conv1D layers are collected together with the others.
        collect=collect_gram if axis == 1 else None,
        limit="max_batches",
        dtypes=(torch.float32, torch.float64, torch.bfloat16),
    )
    for axis, name in GRAMS.items()
)
_OTHERS = (
    StatisticKind(
        FISHER,
        check=_check_squares,
        move=partial(_move_squares, what="diagonal Fisher", instead=_AFTER),
        meaning="diagonal Fisher information, in the shape of the tensor",
        collect=collect_fisher,
        limit="max_rows",
        rows=256,
        follows_rotations=False,
    ),
    StatisticKind(
        TRAINED,
        check=_check_trained,
        move=_move_trained,
        meaning="mask of the rows that the client trained, from `fedrot.completed`",
        numbers=False,
    ),
    StatisticKind("exp_avg", check=_check_shape, move=_move_gradient, meaning="first moment of Adam"),
    StatisticKind(
        "exp_avg_sq",
        check=_check_squares,
        move=partial(_move_squares, what="second moment", instead=_AFTER),
        meaning="second moment of Adam",
        follows_rotations=False,
    ),
)
STATISTIC_KINDS.update({kind.name: kind for kind in (*_GRAMS, *_OTHERS)})
