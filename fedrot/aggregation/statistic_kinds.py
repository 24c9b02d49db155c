"""Statistics that come with an update: by kind, then by tensor name, and whether they can be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.tensors import Tensors, compute_dtype

Statistics = Mapping[str, Tensors]
Shape = tuple[int, ...]

#: Kind of the Gram matrices of a linear layer's inputs, by the axis of the weight that reads them:
#: ``nn.Linear`` holds ``[out, in]``, the ``Conv1D`` of GPT-2 ``[in, out]``.
GRAMS = {1: "gram", 0: "gram_conv1d"}
#: Axis by kind.
INPUT_AXIS = {kind: axis for axis, kind in GRAMS.items()}
#: Diagonal Fisher information in the shape of the tensor.
FISHER = "fisher"
#: Masks ``[rows]`` of the rows of a tensor that the client trained; ``[]`` for all or none.
TRAINED = "trained"

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)

#: Values above this could overflow when they are added up.
_LARGEST = 1e30

#: Rounding to bfloat16 changes a matrix by less than this share of its Frobenius norm.
_ROUNDING = 2**-8


def brings(statistics: Statistics, kind: str) -> bool:
    """Return whether there are statistics of a kind; all Gram matrices count as ``gram``."""
    kinds = INPUT_AXIS if kind in INPUT_AXIS else (kind,)
    return any(statistics.get(one) for one in kinds)


def untrained(statistics: Statistics | None) -> set[str]:
    """Return the tensors of which the client trained no row."""
    return {n for n, mask in (statistics or {}).get(TRAINED, {}).items() if not bool(mask.any())}


def along_rows(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask ``[rows]`` or ``[]`` in a shape that multiplies a tensor row by row."""
    return mask.to(like.device).reshape((-1, *[1] * (like.ndim - 1)) if like.ndim else ())


def check_statistics(statistics: Statistics, shapes: Mapping[str, Shape]) -> None:
    """Check statistics against the shapes of the tensors they belong to.

    Raises:
        UpdateError: an unknown kind or tensor, a shape that does not fit, values that are not finite,
            a negative Fisher, or a Gram matrix that is not symmetric or has negative eigenvalues.
    """
    for kind, by_name in statistics.items():
        if kind not in _CHECKS:
            raise UpdateError(f"Unknown statistics '{kind}'; known kinds: {', '.join(_CHECKS)}.")
        checked: dict[int, Shape] = {}
        for name, value in by_name.items():
            where = f"The {kind} statistics of '{name}'"
            if name not in shapes:
                raise UpdateError(f"{where} belong to no tensor of the model.")
            if checked.get(id(value)) == shapes[name]:
                continue
            if kind in INPUT_AXIS and value.dtype not in _DTYPES:
                raise UpdateError(f"{where} are {value.dtype}; send float32, float64 or bfloat16.")
            if kind != TRAINED and not value.is_floating_point():
                raise UpdateError(f"{where} are {value.dtype}, not floating-point.")
            if kind != TRAINED and not bool((value.abs() <= _LARGEST).all()):
                raise UpdateError(
                    f"{where} hold NaN, Inf or values above {_LARGEST:g}. Check the client's model and "
                    "data."
                )
            problem = _CHECKS[kind](value, shapes[name])
            if problem:
                raise UpdateError(f"{where} {problem}.")
            checked[id(value)] = shapes[name]


def _gram_problem(value: Tensor, shape: Shape, kind: str) -> str | None:
    if len(shape) != 2:
        return "belong to no matrix, so that no layer reads an input with it"
    inputs = shape[INPUT_AXIS[kind]]
    blocks = max(value.shape[0], 1) if value.ndim == 3 else 1
    sizes = {1: (inputs,), 2: (inputs, inputs), 3: (blocks, inputs // blocks, inputs // blocks)}
    if tuple(value.shape) != sizes.get(value.ndim) or (value.ndim == 3 and inputs % blocks):
        return (
            f"have shape {list(value.shape)}, but the layer reads {inputs} inputs; send [in, in], "
            "[heads, in / heads, in / heads] or [in]"
        )
    matrices = value.detach().to(compute_dtype(value))
    if value.ndim == 1:
        return "are negative" if bool((matrices < 0).any()) else None
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    slack = _ROUNDING * norm.clamp_min(torch.finfo(matrices.dtype).tiny)
    if bool(((matrices - matrices.mT).abs() > slack).any()):
        return "are not symmetric; a Gram matrix is X^T X"
    # Positive definite once the largest rounding is added, or not a Gram matrix at all.
    eye = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    _, failed = torch.linalg.cholesky_ex(matrices + slack * eye)
    return "have negative eigenvalues; a Gram matrix is X^T X" if bool(failed.any()) else None


def _fisher_problem(value: Tensor, shape: Shape) -> str | None:
    if tuple(value.shape) != shape:
        return f"have shape {list(value.shape)}, the tensor has {list(shape)}"
    return "are negative; a Fisher information is a mean of squares" if bool((value < 0).any()) else None


def _trained_problem(value: Tensor, shape: Shape) -> str | None:
    if value.dtype != torch.bool:
        return f"are {value.dtype}; a mask is boolean"
    if tuple(value.shape) not in ((), shape[:1]):
        rows = shape[0] if shape else 0
        return f"have shape {list(value.shape)}, but the tensor has {rows} rows"
    return None


def _moment_problem(value: Tensor, shape: Shape) -> str | None:
    return None if tuple(value.shape) == shape else f"have shape {list(value.shape)}, not {list(shape)}"


_CHECKS: dict[str, Callable[[Tensor, Shape], str | None]] = {
    **{kind: partial(_gram_problem, kind=kind) for kind in INPUT_AXIS},
    FISHER: _fisher_problem,
    TRAINED: _trained_problem,
    "exp_avg": _moment_problem,
    "exp_avg_sq": _fisher_problem,
}
