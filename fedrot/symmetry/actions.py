"""Actions of groups on a tensor axis: permutations and rotations.

An element is one tensor. On a *contravariant* slot, the element's inverse transpose
acts. Permutations and rotations act alike on both kinds of slots, because ``R^{-T} =
R``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from fedrot.tensors import Shape, identity


class Action(Protocol):
    """The action of a group: how its elements act, compose and are drawn.

    Attributes:
        stage: the stage in which its groups are matched, one of
            ``fedrot.matching.problem.STAGES``; empty for the stage with the name of the
            group's part.
    """

    stage: ClassVar[str] = ""

    @property
    def units(self) -> int:
        """The number of heads or neurons that the group acts on."""

    @property
    def free(self) -> int:
        """The dimension of the group: 0 for permutations and signs."""
        return 0

    def act(
        self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False
    ) -> Tensor:
        """Return a new tensor: the element applied to one axis of ``x``."""

    def inverse(self, element: Tensor) -> Tensor:
        """Return the inverse element."""

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a random element (float64 or int64, on the CPU)."""

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        """Return the element that acts like ``first`` followed by ``second``."""

    def on_fisher(self, element: Tensor) -> Tensor | None:
        """Return the element for a diagonal Fisher, None if the diagonal is not enough.

        Gradients move by the inverse transpose, and signs have no effect on their
        squares. Permutations move weights and squares alike.
        """
        return element

    def moved(self, element: Tensor) -> Tensor:
        """Return which heads or neurons the element moves, bool ``[units]``."""

    def angle(self, element: Tensor) -> float:
        """Return the average angle of a rotation in degrees; 0 for other actions."""
        return 0.0

    def contains(self, element: Tensor) -> bool:
        """Return whether a tensor is an element, up to rounding in float32."""


class Orders(Action):
    """Orders of an element's last axis, int64 of ``shape``; other axes are batches."""

    @property
    def shape(self) -> Shape:
        """The shape of an element."""
        raise NotImplementedError

    @property
    def units(self) -> int:
        return math.prod(self.shape)

    def inverse(self, element: Tensor) -> Tensor:
        return torch.argsort(element)

    def random(self, generator: torch.Generator) -> Tensor:
        *batches, n = self.shape
        count = math.prod(batches)
        orders = [torch.randperm(n, generator=generator) for _ in range(count)]
        return torch.stack(orders).reshape(self.shape)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return first.gather(-1, second)

    def moved(self, element: Tensor) -> Tensor:
        return (element.cpu() != self._identity()).flatten()

    def contains(self, element: Tensor) -> bool:
        if element.dtype != torch.int64 or element.shape != self.shape:
            return False
        return bool((element.sort().values.cpu() == self._identity()).all())

    def _identity(self) -> Tensor:
        return torch.arange(self.shape[-1])


@dataclass(frozen=True)
class Permutation(Orders):
    """All orders of ``n`` equal blocks; element ``e`` is an index ``[n]``.

    Block ``i`` was block ``e[i]``.
    """

    n: int

    @property
    def shape(self) -> Shape:
        return (self.n,)

    def act(
        self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False
    ) -> Tensor:
        index = element.to(x.device)
        if x.shape[axis] == self.n:
            return x.index_select(axis, index)
        blocks = x.unflatten(axis, (self.n, -1))
        return blocks.index_select(axis, index).flatten(axis, axis + 1)


@dataclass(frozen=True)
class HeadPermutation(Permutation):
    """All orders of ``n`` attention heads, or groups of heads."""

    stage: ClassVar[str] = "heads"


@dataclass(frozen=True)
class QueryPermutation(Orders):
    """The orders of the ``n`` query heads that share a key head, in each group.

    Element ``e`` is ``[groups, n]``: head ``i`` of group ``g`` was its head ``e[g,
    i]``.
    """

    stage: ClassVar[str] = "queries"

    groups: int
    n: int

    @property
    def shape(self) -> Shape:
        return (self.groups, self.n)

    def act(
        self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False
    ) -> Tensor:
        first = self.n * torch.arange(self.groups, device=element.device)
        heads = (first[:, None] + element).flatten()
        return Permutation(self.units).act(heads, x, axis)


@dataclass(frozen=True)
class InsideHeads(Action):
    """An action inside each of ``heads`` key heads, on ``dim`` units of a head.

    If an axis has several times ``heads * dim`` entries, it holds query heads that
    share a key head: consecutive query heads are moved by the same element.
    """

    stage: ClassVar[str] = "attention"

    heads: int
    dim: int

    @property
    def units(self) -> int:
        return self.heads


@dataclass(frozen=True)
class HeadRotation(InsideHeads):
    """``O(dim)`` with reflections in each head; an element is ``[heads, dim, dim]``.

    Source: Zhang et al. 2025, Eq. 5 and Theorem 4.1 (orthogonal part of the head's
    symmetry).
    """

    @property
    def free(self) -> int:
        return self.heads * self.dim * (self.dim - 1) // 2

    def act(
        self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False
    ) -> Tensor:
        if x.ndim == 2 and axis == 1 and x.shape[1] == self.heads * self.dim:
            # The general case would copy the transposed matrix twice.
            heads = x.unflatten(1, (self.heads, self.dim)).transpose(0, 1)
            return (heads @ element.to(x).mT).transpose(0, 1).flatten(1)
        leading = x.movedim(axis, 0)
        blocks = leading.reshape(self.heads, -1, self.dim, leading[0].numel())
        rotated = element.to(x).unsqueeze(1) @ blocks
        return rotated.reshape(leading.shape).movedim(0, axis)

    def inverse(self, element: Tensor) -> Tensor:
        return element.mT

    def random(self, generator: torch.Generator) -> Tensor:
        normal = torch.randn(
            (self.heads, self.dim, self.dim), generator=generator, dtype=torch.float64
        )
        q, r = torch.linalg.qr(normal)
        # Without the signs of R's diagonal, Q would not be uniform on O(dim).
        return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return second @ first

    def on_fisher(self, element: Tensor) -> Tensor | None:
        ordered = ((element == 0) | (element.abs() == 1)).all()
        return element.abs() if ordered else None

    def moved(self, element: Tensor) -> Tensor:
        return _beyond_identity(element).amax(dim=(-2, -1)) > 1e-6

    def exponential(self, parameter: Tensor) -> Tensor:
        """Return a rotation ``exp(X - X^T)`` for any ``X``, ``[heads, dim, dim]``."""
        return torch.matrix_exp(parameter - parameter.mT)

    def angle(self, element: Tensor) -> float:
        cosine = torch.diagonal(element, dim1=-2, dim2=-1).mean(-1).clamp(-1, 1)
        return float(torch.rad2deg(torch.arccos(cosine)).mean())

    def contains(self, element: Tensor) -> bool:
        if not is_real(element, (self.heads, self.dim, self.dim)):
            return False
        wide = element.double()
        return bool((_beyond_identity(wide @ wide.mT) <= 1e-4).all())


def _beyond_identity(matrices: Tensor) -> Tensor:
    """Return the absolute differences to the identity."""
    return (matrices - identity(matrices)).abs()


def is_real(element: Tensor, shape: Shape) -> bool:
    """Return whether a tensor has this shape and finite floating-point entries."""
    if element.dtype not in (torch.float32, torch.float64) or element.shape != shape:
        return False
    return bool(torch.isfinite(element).all())
