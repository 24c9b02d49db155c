"""Actions under rotary positions: a phase or a sign for each rotary frequency."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.symmetry.actions import InsideHeads, is_real
from fedrot.tensors import Shape


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
        if self.interleaved:
            pairs = pairs.transpose(2, 3)
        return pairs.reshape(shape)

    def act(
        self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False
    ) -> Tensor:
        leading = x.movedim(axis, 0)
        moved = self._on_pairs(element, self.pairs(leading))
        return self.joined(moved, leading.shape).movedim(0, axis)

    def _on_pairs(self, element: Tensor, pairs: Tensor) -> Tensor:
        """Return pairs that an element has moved."""
        raise NotImplementedError

    @property
    def frequencies(self) -> Shape:
        """The shape of an element: a number for each frequency of each head."""
        return (self.heads, self.dim // 2)


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

    def _on_pairs(self, element: Tensor, pairs: Tensor) -> Tensor:
        first, second = pairs.unbind(2)
        cos = element.cos().to(pairs)[:, None, :, None]
        sin = element.sin().to(pairs)[:, None, :, None]
        turned = [cos * first - sin * second, sin * first + cos * second]
        return torch.stack(turned, 2)

    def inverse(self, element: Tensor) -> Tensor:
        return -element

    def random(self, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(self.frequencies, generator=generator, dtype=torch.float64)
        return torch.pi * (2 * uniform - 1)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return second + first

    def on_fisher(self, element: Tensor) -> Tensor | None:
        still = (element.sin().abs() <= 1e-12).all()
        return torch.zeros_like(element) if still else None

    def moved(self, element: Tensor) -> Tensor:
        return (self._turns(element) > 1e-6).any(1)

    def angle(self, element: Tensor) -> float:
        return float(torch.rad2deg(self._turns(element)).mean())

    def contains(self, element: Tensor) -> bool:
        return is_real(element, self.frequencies)

    def _turns(self, element: Tensor) -> Tensor:
        """Return angles between 0 and pi."""
        return torch.arccos(element.double().cos().clamp(-1, 1))


@dataclass(frozen=True)
class RotarySigns(_Rotary):
    """One sign for each rotary frequency of a key head, ``[heads, dim / 2]``.

    If queries and keys pass a norm with gains, no other ``RotaryPhases`` preserve the
    function.
    """

    def _on_pairs(self, element: Tensor, pairs: Tensor) -> Tensor:
        return pairs * element.to(pairs)[:, None, None, :, None]

    def inverse(self, element: Tensor) -> Tensor:
        return element

    def random(self, generator: torch.Generator) -> Tensor:
        return 2 * torch.randint(2, self.frequencies, generator=generator) - 1

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return second * first

    def on_fisher(self, element: Tensor) -> Tensor:
        return torch.ones_like(element)

    def moved(self, element: Tensor) -> Tensor:
        return (element < 0).any(1)

    def contains(self, element: Tensor) -> bool:
        if element.dtype != torch.int64 or element.shape != self.frequencies:
            return False
        return bool((element.abs() == 1).all())
