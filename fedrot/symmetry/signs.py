"""Actions with signs: orders of units whose signs may change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.symmetry.actions import Orders, Permutation
from fedrot.tensors import along_axis


class SignedOrders(Orders):
    """Orders and signs; entries ``e[i]`` of an element are indices from 1, with signs.

    Unit ``i`` was ``sign(e[i])`` times unit ``|e[i]| - 1``.
    """

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
    """All orders and signs of ``n`` units of an odd activation (or of an RMSNorm's
    stream).
    """

    def act(
        self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False
    ) -> Tensor:
        moved = super().act(element.abs() - 1, x, axis)
        return moved * along_axis(element.sign(), axis, moved)
