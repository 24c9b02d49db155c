"""Rotations of the residual stream of pre-norm models, and the norms to fold before.

Every block reads the stream through a norm, and the skip path has no gain. If the gains
are folded into the weights that read the norms, any orthogonal ``Q`` may rotate the
stream, because ``rms(Q x) = rms(x)``. LayerNorm also removes the mean of its input, so
the weights that write the stream are centred, and ``Q`` must keep the vector of ones.
(Ashkboos et al. 2024, SliceGPT, section 3; Theus et al. 2025.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrot.symmetry.actions import HeadRotation
from fedrot.symmetry.describe.spaces import Axes, Norms, read

#: A tensor's name and one of its axes.
Place = tuple[str, int]


@dataclass(frozen=True)
class StreamRotation(HeadRotation):
    """``O(dim)`` on the residual stream; with ``centred``, what keeps the ones' vector.

    An element is ``[1, dim, dim]``; ``heads`` is 1. Under LayerNorm the stream is
    ``centred``.
    """

    stage: ClassVar[str] = ""

    centred: bool = False

    @property
    def free(self) -> int:
        moving = self.dim - self.centred
        return moving * (moving - 1) // 2

    def random(self, generator: torch.Generator) -> Tensor:
        if not self.centred:
            return super().random(generator)
        inside = HeadRotation(1, self.dim - 1).random(generator)[0]
        basis = centred_basis(self.dim)
        rotated = basis @ inside @ basis.mT
        # The projection on the vector of ones, which stays.
        return (torch.full_like(rotated, 1 / self.dim) + rotated)[None]

    def exponential(self, parameter: Tensor) -> Tensor:
        skew = parameter - parameter.mT
        if self.centred:
            skew = skew - skew.mean(-1, keepdim=True)
            skew = skew - skew.mean(-2, keepdim=True)
        return torch.matrix_exp(skew)

    def contains(self, element: Tensor) -> bool:
        rotation = super().contains(element)
        if not (rotation and self.centred):
            return rotation
        return bool(((element.double().sum(-1) - 1).abs() <= 1e-4).all())


def centred_basis(dim: int) -> Tensor:
    """Return a basis of the vectors without mean, orthonormal ``[dim, dim - 1]``."""
    vectors = torch.eye(dim, dtype=torch.float64)
    vectors[:, 0] = 1
    return torch.linalg.qr(vectors).Q[:, 1:]


@dataclass(frozen=True)
class NormReader:
    """A weight that reads a norm.

    Attributes:
        axis: the axis of its inputs.
        bias: of the same module, empty if it has none.
    """

    weight: str
    axis: int
    bias: str


@dataclass(frozen=True)
class Fold:
    """A norm whose gain can be folded into the weights that read the norm.

    Attributes:
        space: the residual stream that the norm reads.
        gain: the tensor ``[dim]``.
        bias: of the norm, empty if it has none.
        readers: all weights that read the norm.
    """

    space: str
    gain: str
    bias: str
    readers: tuple[NormReader, ...]

    @property
    def tensors(self) -> set[str]:
        """The names of all tensors that folding changes."""
        names = {self.gain, self.bias}
        for reader in self.readers:
            names |= {reader.weight, reader.bias}
        return names - {""}

    @property
    def holds_bias(self) -> bool:
        """True if all readers have a bias, which can hold the norm's bias."""
        return all(reader.bias for reader in self.readers)


def folds_of(space: str, axes: Axes, norms: Norms) -> tuple[Fold, ...] | str:
    """Return the norms of a stream, or the reason why it cannot be rotated.

    Args:
        axes: of all tensors of the model, by the model's names.
        norms: by gain, the weights that read the norm; empty for the last norm, which
            all other weights read.
    """
    entry = read(space)
    items = axes.items()
    reading = {name: spaces.index(entry) for name, spaces in items if entry in spaces}
    gains = [name for name, spaces in items if f"|{space}|" in spaces]
    if not gains:
        return "no norm reads it"
    for gain in gains:
        if gain not in norms:
            return (
                f"the gain '{gain}' acts on the stream itself or on the output of a "
                "block"
            )
    for name in reading:
        if space in axes[name]:
            return f"'{name}' reads the stream and writes it"
    claimed = {name for gain in gains for name in norms[gain]}
    rest = tuple(name for name in reading if name not in claimed)
    last = [gain for gain in gains if not norms[gain]]
    if rest and len(last) != 1:
        return f"'{rest[0]}' reads the stream without a norm"
    folds = []
    for gain in gains:
        readers = (
            NormReader(name, reading[name], _bias_beside(name, axes))
            for name in norms[gain] or rest
        )
        folds.append(Fold(space, gain, _bias_beside(gain, axes), tuple(readers)))
    return tuple(folds)


def without_mean(places: Iterable[Place], folds: Sequence[Fold]) -> Iterator[Place]:
    """Yield the places on a stream under LayerNorm that may be centred.

    Weights that write the stream may be centred, because LayerNorm removes the mean of
    its input. Weights that read the norm may be centred if its bias is folded: its
    output then has mean 0.
    """
    kept = {name for fold in folds for name in (fold.gain, fold.bias)}
    for fold in folds:
        if fold.bias and not fold.holds_bias:
            kept |= {reader.weight for reader in fold.readers}
    return (place for place in places if place[0] not in kept)


def _bias_beside(weight: str, axes: Axes) -> str:
    bias = f"{weight.removesuffix('.weight')}.bias"
    return bias if weight.endswith(".weight") and bias in axes else ""
