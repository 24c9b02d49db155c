"""Actions with signs and scales: orders of units with signs, and factors of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrot.symmetry.actions import LARGEST_SCALE, Kind, Orders, Permutation, is_real
from fedrot.tensors import along_axis


class SignedOrders(Orders):
    """Orders and signs: unit ``i`` was ``sign(e[i])`` times unit ``|e[i]| - 1``, an index from 1."""

    def inverse(self, element: Tensor) -> Tensor:
        order = torch.argsort(element.abs())
        return (order + 1) * element.sign().gather(-1, order)

    def random(self, generator: torch.Generator) -> Tensor:
        signs = 2 * torch.randint(2, self.shape, generator=generator) - 1
        return (super().random(generator) + 1) * signs

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return first.gather(-1, second.abs() - 1) * second.sign()

    def on_fisher(self, element: Tensor) -> Tensor:
        return element.abs()

    def moved(self, element: Tensor) -> Tensor:
        return super().moved(element - 1)

    def contains(self, element: Tensor) -> bool:
        return element.dtype == torch.int64 and super().contains(element.abs() - 1)


@dataclass(frozen=True)
class SignedPermutation(SignedOrders, Permutation):
    """All orders and signs of ``n`` units of an odd activation (or of an RMSNorm's stream)."""

    def act(self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False) -> Tensor:
        moved = super().act(element.abs() - 1, x, axis)
        return moved * along_axis(element.sign(), axis, moved)


@dataclass(frozen=True)
class Rescale(Kind):
    """One non-zero factor per head; an element is ``[heads]``, the contravariant side is divided by it.

    Source: Zhang et al. 2025, Eq. 11.
    """

    stage: ClassVar[str] = "rescale"

    heads: int

    @property
    def units(self) -> int:
        return self.heads

    @property
    def free(self) -> int:
        return self.heads

    def act(self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False) -> Tensor:
        factor = element.reciprocal() if contravariant else element
        per_row = factor.to(x).repeat_interleave(x.shape[axis] // self.heads)
        return x * along_axis(per_row, axis, x)

    def inverse(self, element: Tensor) -> Tensor:
        return element.reciprocal()

    def random(self, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(self.heads, generator=generator, dtype=torch.float64)
        return torch.exp2(2 * uniform - 1)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return second * first

    def on_fisher(self, element: Tensor) -> Tensor:
        return element.square().reciprocal()

    def moved(self, element: Tensor) -> Tensor:
        return (element - 1).abs() > 1e-6

    def contains(self, element: Tensor) -> bool:
        if not is_real(element, (self.heads,)):
            return False
        scales = element.abs()
        return bool(((scales <= LARGEST_SCALE) & (scales >= 1 / LARGEST_SCALE)).all())
