"""Statistics of updates by kind: Gram matrices, Fisher information, trained rows.

The statistics of an update are mappings by kind, then by tensor name: ``{"gram":
{"fc.weight": G}}``. ``STATISTIC_KINDS`` holds, for each kind, how it is checked, moved
with the weights, and collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from fedrot.errors import FedrotError, UpdateError
from fedrot.symmetry.groups import Move, Slot
from fedrot.tensors import (
    Shape,
    Shapes,
    TensorDict,
    Tensors,
    compute_dtype,
    full_float32,
    identity,
)

Statistics = Mapping[str, Tensors]
#: Statistics as new dictionaries.
Collected = dict[str, TensorDict]

#: Gram matrices of the inputs of ``nn.Linear``, whose weights are ``[out, in]``.
GRAM = "gram"
#: Those of the ``Conv1D`` of GPT-2, whose weights are ``[in, out]``.
GRAM_CONV1D = "gram_conv1d"
#: By kind, the axis of the weight that the inputs are multiplied with.
INPUT_AXIS = {GRAM: 1, GRAM_CONV1D: 0}
#: Diagonal Fisher information in the shape of the tensor.
FISHER = "fisher"
#: Masks ``[rows]`` of the rows of a tensor that the client trained; ``[]`` for all or
#: none.
TRAINED = "trained"

#: Sums of larger values could overflow.
LARGEST = 1e30
#: Rounding to bfloat16 changes a matrix by less than this share of its Frobenius norm.
_ROUNDING = 2**-8
#: Moving a matrix in float32 changes entries by less than this share of the largest.
_MOVING = 2**-14

Collector = TypeVar("Collector", bound=Callable[..., Statistics])


@dataclass(frozen=True)
class StatisticKind:
    """One kind of statistics, under its name in ``Statistics``.

    Attributes:
        check: takes a value and the shape of its tensor; returns a fault ("are
            negative") or None.
        move: takes a value, a slot of its tensor and the move that acts on the slot;
            returns the moved value, or raises ``FedrotError`` if the move cannot be
            applied to the value.
        meaning: one line for the documentation.
        collect: takes a model and batches, returns statistics. None if statistics are
            not computed from batches; the training code then sends them.
        limit: the argument of ``collect`` that limits the data, for which None means no
            limit.
        follows_rotations: whether ``move`` accepts rotations of heads.
        dtypes: accepted dtypes, ``torch.bool`` for masks; every floating-point dtype if
            empty.
    """

    name: str
    check: Callable[[Tensor, Shape], str | None]
    move: Callable[[Tensor, Slot, Move], Tensor]
    meaning: str
    collect: Callable[..., Statistics] | None = None
    limit: str = ""
    follows_rotations: bool = True
    dtypes: tuple[torch.dtype, ...] = ()

    def collected(
        self,
        model: Module,
        batches: Iterable[Tensors],
        limited: bool = True,
    ) -> Statistics:
        """Return statistics of a model.

        Raises ``FedrotError`` if they are not computed from batches.
        """
        if self.collect is None:
            raise FedrotError(
                f"Statistics '{self.name}' cannot be computed from batches: they come "
                "from training. The client's training code must send them."
            )
        if limited or not self.limit:
            return self.collect(model, batches)
        return self.collect(model, batches, **{self.limit: None})


#: All registered kinds by name. Add your own kind with ``STATISTIC_KINDS[kind.name] =
#: kind``.
STATISTIC_KINDS: dict[str, StatisticKind] = {}


def kind_named(name: str) -> StatisticKind:
    """Return a registered kind; raises ``UpdateError`` if there is none."""
    if name not in STATISTIC_KINDS:
        raise UpdateError(
            f"Unknown statistics '{name}'; known kinds: {', '.join(STATISTIC_KINDS)}."
        )
    return STATISTIC_KINDS[name]


def collects(name: str) -> Callable[[Collector], Collector]:
    """Return a decorator for the function that collects a registered kind."""

    def register(collect: Collector) -> Collector:
        STATISTIC_KINDS[name] = replace(kind_named(name), collect=collect)
        return collect

    return register


def brings(
    statistics: Statistics,
    kind: str,
) -> bool:
    """Return whether there are statistics of a kind.

    ``gram`` and ``gram_conv1d`` count as one kind.
    """
    if kind in INPUT_AXIS:
        return any(map(statistics.get, INPUT_AXIS))
    return bool(statistics.get(kind))


def untrained(statistics: Statistics | None) -> set[str]:
    """Return the tensors of which the client trained no row."""
    masks = (statistics or {}).get(TRAINED, {})
    return {name for name, mask in masks.items() if not mask.any()}


def along_rows(
    mask: Tensor,
    like: Tensor,
) -> Tensor:
    """Return a mask ``[rows]`` or ``[]``, reshaped to broadcast along rows."""
    mask = mask.to(like.device)
    if like.ndim == 0:
        return mask.reshape(())
    return mask.reshape(-1, *[1] * (like.ndim - 1))


def check_statistics(
    statistics: Statistics,
    shapes: Shapes,
) -> None:
    """Check statistics against the shapes of the tensors they belong to.

    Raises:
        UpdateError: an unknown kind or tensor, a shape that does not fit, values that
            are not finite, or a fault that the kind's own ``check`` returns.
    """
    for kind_name, by_name in statistics.items():
        kind = kind_named(kind_name)
        # Layers with the same input share one matrix, which is checked once.
        checked: set[tuple[int, Shape]] = set()
        for name, value in by_name.items():
            shape = _shape_of(kind, name, shapes)
            key = (id(value), shape)
            if key in checked:
                continue
            fault = _fault_of_numbers(value, kind) or kind.check(value, shape)
            if fault:
                raise UpdateError(f"The {kind.name} statistics of '{name}' {fault}.")
            checked.add(key)


def _shape_of(
    kind: StatisticKind,
    name: str,
    shapes: Shapes,
) -> Shape:
    """Return the shape of the tensor of statistics; raise ``UpdateError`` if none."""
    if name not in shapes:
        raise UpdateError(
            f"The {kind.name} statistics of '{name}' belong to no tensor of the model."
        )
    return shapes[name]


def _fault_of_numbers(
    value: Tensor,
    kind: StatisticKind,
) -> str | None:
    if kind.dtypes and value.dtype not in kind.dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in kind.dtypes)
        return f"are {value.dtype}; send {known}"
    if not kind.dtypes and not value.is_floating_point():
        return f"are {value.dtype}, not floating-point"
    # The limit exceeds the range of float16.
    if not (value.to(compute_dtype(value)).abs() <= LARGEST).all():
        return (
            f"hold NaN, Inf or values above {LARGEST:g}. Check the client's model and "
            "data"
        )
    return None


@full_float32()
def transport_statistics(
    statistics: Statistics,
    moves: Iterable[Move],
    shapes: Shapes,
) -> Collected:
    """Move statistics like the weights they belong to; see ``Alignment.transport``.

    Raises:
        UpdateError: an unknown kind or tensor.
        FedrotError: a move cannot be applied to a value.
    """
    out: Collected = {}
    for kind_name, by_name in statistics.items():
        kind = kind_named(kind_name)
        for name in by_name:
            _shape_of(kind, name, shapes)
        out[kind.name] = dict(by_name)
    for move in moves:
        for kind_name, moved in out.items():
            # Layers with the same input share one Gram matrix, also after the move.
            shared: dict[tuple[int, Slot], Tensor] = {}
            # The copy holds references, so that ids stay unique.
            before = dict(moved)
            for slot in move.group.slots:
                if slot.tensor not in moved:
                    continue
                value = moved[slot.tensor]
                key = (id(value), replace(slot, tensor=""))
                if value is not before[slot.tensor] or key not in shared:
                    shared[key] = kind_named(kind_name).move(value, slot, move)
                moved[slot.tensor] = shared[key]
    return out


def _check_gram(
    value: Tensor,
    shape: Shape,
    axis: int,
) -> str | None:
    if len(shape) != 2:
        return "belong to a tensor that is no matrix, and so to no linear layer"
    inputs = shape[axis]
    square = [inputs, inputs]
    if list(value.shape) != square:
        return (
            f"have shape {list(value.shape)}, but the layer reads {inputs}; send "
            f"{square}"
        )
    matrix = value.detach().to(compute_dtype(value))
    negative = "have negative eigenvalues; a Gram matrix is X^T X"
    if (matrix.diagonal() < 0).any():
        return negative
    if not matrix.any():
        return None
    even, _ = _unit_diagonal(matrix)
    slack = _ROUNDING * torch.linalg.vector_norm(even) + _ROUNDING**2
    if ((even - even.mT).abs() > slack).any():
        return "are not symmetric; a Gram matrix is X^T X"
    # Rounding may have made a small eigenvalue negative, so the largest rounding error
    # is added.
    _, failed = torch.linalg.cholesky_ex(even + slack * identity(even))
    return negative if failed else None


def _unit_diagonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix with a diagonal of 1 as in RegMean, and its factors ``[n]``.

    With another diagonal, one large entry would hide all others.
    """
    largest = matrix.abs().amax().clamp_min(torch.finfo(matrix.dtype).tiny)
    scale = (matrix.diagonal().clamp_min(0) / largest + _MOVING).rsqrt()
    even = matrix / largest * scale.unsqueeze(1) * scale
    return even, scale * largest.rsqrt()


def semidefinite(
    moved: Tensor,
    received: Tensor,
) -> Tensor:
    """Return a moved Gram matrix without the negative eigenvalues of rounding.

    A matrix that was rounded may have negative eigenvalues after a rotation or a shift
    of its inputs, which changes how large its units are. They become 0. If the matrix
    was none of inputs when it was received, it stays as it is, for
    ``check_statistics``.
    """
    shape = tuple(moved.shape)
    if not _check_gram(moved, shape, 1) or _check_gram(received, shape, 1):
        return moved
    even, scale = _unit_diagonal(moved.detach().double())
    values, vectors = torch.linalg.eigh((even + even.mT) / 2)
    nearest = vectors * values.clamp_min(0) @ vectors.mT
    nearest = nearest / scale.unsqueeze(1) / scale
    return ((nearest + nearest.mT) / 2).to(moved.dtype)


def _move_inputs(
    value: Tensor,
    slot: Slot,
    move: Move,
    axis: int,
) -> Tensor:
    """Move a Gram matrix of inputs that multiply the weight's ``axis``.

    Inputs move contravariantly to the weight: ``G -> T G T^T``.
    """
    if slot.axis != axis:
        return value
    other = replace(slot, axis=0, contravariant=not slot.contravariant)
    moved = move.on(move.on(value, other), replace(other, axis=1))
    # Permutations and signs, which can move a diagonal, have no rounding.
    if move.group.action.on_fisher(move.element) is not None:
        return moved
    return semidefinite(moved, value)


def _check_fisher(
    value: Tensor,
    shape: Shape,
) -> str | None:
    if tuple(value.shape) != shape:
        return f"have shape {list(value.shape)}, the tensor has {list(shape)}"
    if (value < 0).any():
        return "are negative; they are means of squares"
    return None


def _move_squares(
    value: Tensor,
    slot: Slot,
    move: Move,
    what: str,
    instead: str,
) -> Tensor:
    """Move squares of a gradient's coordinates by a permutation or signs."""
    element = move.group.action.on_fisher(move.element)
    if element is None:
        raise FedrotError(
            f"The rotation '{move.group.name}' cannot be applied to the {what} of "
            f"'{slot.tensor}': a diagonal does not determine the rotated diagonal. "
            f"{instead}"
        )
    return replace(move, element=element).on(value, slot)


def _check_trained(
    value: Tensor,
    shape: Shape,
) -> str | None:
    if tuple(value.shape) not in ((), shape[:1]):
        rows = shape[0] if shape else 0
        return f"have shape {list(value.shape)}, but the tensor has {rows} rows"
    return None


def _move_trained(
    value: Tensor,
    slot: Slot,
    move: Move,
) -> Tensor:
    # With all rows marked or none, the mask has no order.
    if value.all() or not value.any() or slot.axis != 0:
        return value
    return _move_squares(
        value,
        slot,
        move,
        "mask of trained rows",
        "Mark all of its rows or none.",
    )


for _name, _axis in INPUT_AXIS.items():
    _meaning = (
        f"Gram matrix `X^T X / n` of the inputs `X`, which multiply axis {_axis} "
        "of the weight"
    )
    STATISTIC_KINDS[_name] = StatisticKind(
        _name,
        check=partial(_check_gram, axis=_axis),
        move=partial(_move_inputs, axis=_axis),
        meaning=_meaning,
        limit="max_batches",
        dtypes=(torch.float32, torch.float64, torch.bfloat16),
    )
STATISTIC_KINDS[FISHER] = StatisticKind(
    FISHER,
    check=_check_fisher,
    move=partial(
        _move_squares,
        what="diagonal Fisher",
        instead=(
            "Compute it after aligning, or align by permutations only, parts=('heads', "
            "'ffn')."
        ),
    ),
    meaning="diagonal Fisher information, in the shape of the tensor",
    limit="max_rows",
    follows_rotations=False,
)
STATISTIC_KINDS[TRAINED] = StatisticKind(
    TRAINED,
    check=_check_trained,
    move=_move_trained,
    meaning="mask of the rows that the client trained, from `fedrot.completed`",
    dtypes=(torch.bool,),
)
