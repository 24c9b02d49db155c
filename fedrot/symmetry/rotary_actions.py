"""Actions under rotary positions: a phase or a sign for each rotary frequency."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.symmetry.actions import InsideHeads, is_real


@dataclass(frozen=True)
class _Rotary(InsideHeads):
    """The rotary frequencies of ``heads`` key heads of ``dim`` units.

    Each frequency rotates two coordinates: ``f`` and ``f + dim / 2``, or ``2 f`` and
    ``2 f + 1`` if ``interleaved``. Query heads that share a key head are moved by the
    key head's element.
    """

    interleaved: bool = False

    def pairs(self, rows: Tensor) -> Tensor:
        """Return rows ``[size, ...]`` as ``[heads, shared, 2, dim / 2, rest]``."""
        rest = rows[0].numel()
        if self.interleaved:
            return rows.reshape(self.heads, -1, self.dim // 2, 2, rest).transpose(2, 3)
        return rows.reshape(self.heads, -1, 2, self.dim // 2, rest)

    def joined(self, pairs: Tensor, shape: torch.Size) -> Tensor:
        """Return rows of a shape; the inverse of ``pairs``."""
        return (pairs.transpose(2, 3) if self.interleaved else pairs).reshape(shape)


@dataclass(frozen=True)
class RotaryPhases(_Rotary):
    """One angle for each of the ``dim / 2`` rotary frequencies of ``heads`` key heads.

    An element is ``[heads, dim / 2]`` in radians. Rotary positions allow no other
    rotation of queries and keys.

    Source: Su et al. 2021 (RoFormer), Eq. 34: these rotations commute with every rotary
    matrix.
    """

    @property
    def free(self) -> int:
        return self.heads * self.dim // 2

    def act(
        self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False
    ) -> Tensor:
        leading = x.movedim(axis, 0)
        first, second = self.pairs(leading).unbind(2)
        cos, sin = (
            part.to(x)[:, None, :, None] for part in (element.cos(), element.sin())
        )
        turned = torch.stack(
            [cos * first - sin * second, sin * first + cos * second], 2
        )
        return self.joined(turned, leading.shape).movedim(0, axis)

    def inverse(self, element: Tensor) -> Tensor:
        return -element

    def random(self, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(
            self.heads, self.dim // 2, generator=generator, dtype=torch.float64
        )
        return torch.pi * (2 * uniform - 1)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return second + first

    def on_fisher(self, element: Tensor) -> Tensor | None:
        still = bool((element.sin().abs() <= 1e-12).all())
        return torch.zeros_like(element) if still else None

    def moved(self, element: Tensor) -> Tensor:
        return (self._turns(element) > 1e-6).any(1)

    def angle(self, element: Tensor) -> float:
        return float(torch.rad2deg(self._turns(element)).mean())

    def contains(self, element: Tensor) -> bool:
        return is_real(element, (self.heads, self.dim // 2))

    def _turns(self, element: Tensor) -> Tensor:
        """Return angles between 0 and pi."""
        return torch.arccos(element.double().cos().clamp(-1, 1))


@dataclass(frozen=True)
class RotarySigns(_Rotary):
    """One sign for each rotary frequency of ``heads`` key heads, ``[heads, dim / 2]``
    of 1 and -1.

    If queries and keys pass a norm with gains, no other ``RotaryPhases`` preserve the
    function.
    """

    def act(
        self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False
    ) -> Tensor:
        leading = x.movedim(axis, 0)
        pairs = self.pairs(leading) * element.to(x)[:, None, None, :, None]
        return self.joined(pairs, leading.shape).movedim(0, axis)

    def inverse(self, element: Tensor) -> Tensor:
        return element

    def random(self, generator: torch.Generator) -> Tensor:
        return (
            2 * torch.randint(2, (self.heads, self.dim // 2), generator=generator) - 1
        )

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return second * first

    def on_fisher(self, element: Tensor) -> Tensor:
        return torch.ones_like(element)

    def moved(self, element: Tensor) -> Tensor:
        return (element < 0).any(1)

    def contains(self, element: Tensor) -> bool:
        right = element.dtype == torch.int64 and tuple(element.shape) == (
            self.heads,
            self.dim // 2,
        )
        return right and bool((element.abs() == 1).all())
