"""The kinds of group that act on a tensor axis: how an element acts, inverts, and is drawn.

An element is always one tensor. ``act`` receives a floating-point ``x`` and the axis the group acts
on, and returns a new tensor of the same shape and dtype. Slots on the *contravariant* side (the side
that must undo the covariant one) pass ``contravariant=True``; for permutations and rotations both
sides move alike, because ``R^{-T} = R``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

#: Elements from elsewhere that stretch or shrink by more than this lose too many digits in float32.
LARGEST_SCALE = 1e3


class Kind(Protocol):
    """What alignment, transport and the property tests need to know about a group.

    Attributes:
        stage: when its groups are matched, one of ``fedrot.matching.stages.STAGES``; empty for the
            stage named like the group's part.
    """

    stage: ClassVar[str]

    @property
    def units(self) -> int:
        """How many heads or neurons the group acts on."""

    def act(self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False) -> Tensor:
        """Return the element applied to one axis of ``x``."""

    def inverse(self, element: Tensor) -> Tensor:
        """Return the inverse element."""

    def random(self, generator: torch.Generator) -> Tensor:
        """Draw a random element (float64 or int64, on the CPU)."""

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        """Return the element that acts like ``first`` followed by ``second``."""

    def on_fisher(self, element: Tensor) -> Tensor | None:
        """Return the element by which a diagonal Fisher moves, None if its diagonal cannot follow.

        Gradients move inversely to weights, and signs do not show in their squares.
        """

    def moved(self, element: Tensor) -> Tensor:
        """Return which of the ``units`` heads or neurons the element moves, bool ``[units]``."""

    def angle(self, element: Tensor) -> float:
        """Return by how many degrees the element turns what it moves, on average; 0 if it does not."""

    def contains(self, element: Tensor) -> bool:
        """Whether a tensor from elsewhere is an element of this group, to the rounding of float32."""


@dataclass(frozen=True)
class Permutation:
    """All orders of ``n`` equal blocks; element ``e`` is an index ``[n]``: block ``i`` was ``e[i]``."""

    stage: ClassVar[str] = ""

    n: int

    @property
    def units(self) -> int:
        return self.n

    def act(self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False) -> Tensor:
        index = element.to(x.device)
        if x.shape[axis] == self.n:
            return x.index_select(axis, index)
        return x.unflatten(axis, (self.n, -1)).index_select(axis, index).flatten(axis, axis + 1)

    def inverse(self, element: Tensor) -> Tensor:
        return torch.argsort(element)

    def random(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(self.n, generator=generator)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return first[second]

    def on_fisher(self, element: Tensor) -> Tensor:
        return element

    def moved(self, element: Tensor) -> Tensor:
        return element.cpu() != torch.arange(self.n)

    def angle(self, element: Tensor) -> float:
        return 0.0

    def contains(self, element: Tensor) -> bool:
        return _is_order(element, self.n)


@dataclass(frozen=True)
class SignedPermutation(Permutation):
    """All orders and signs of ``n`` units of an odd activation (or of an RMSNorm's stream).

    Element ``e`` is an index from 1 with signs, ``[n]``: unit ``i`` was ``sign(e[i])`` times unit
    ``|e[i]| - 1``.
    """

    def act(self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False) -> Tensor:
        moved = super().act(element.abs() - 1, x, axis)
        signs = element.sign().to(moved)
        return moved * signs.reshape([-1 if d == axis else 1 for d in range(x.ndim)])

    def inverse(self, element: Tensor) -> Tensor:
        order = torch.argsort(element.abs())
        return (order + 1) * element.sign()[order]

    def random(self, generator: torch.Generator) -> Tensor:
        signs = 2 * torch.randint(2, (self.n,), generator=generator) - 1
        return (super().random(generator) + 1) * signs

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return first[second.abs() - 1] * second.sign()

    def on_fisher(self, element: Tensor) -> Tensor:
        return element.abs()

    def moved(self, element: Tensor) -> Tensor:
        return element.cpu() != torch.arange(1, self.n + 1)

    def contains(self, element: Tensor) -> bool:
        return element.dtype == torch.int64 and _is_order(element.abs() - 1, self.n)


@dataclass(frozen=True)
class HeadPermutation(Permutation):
    """The orders of ``n`` attention heads, or groups of heads: whole blocks trade places."""

    stage: ClassVar[str] = "heads"


@dataclass(frozen=True)
class QueryPermutation:
    """The orders of the ``n`` query heads that share a key head, in each of ``groups`` groups.

    Element ``e`` is ``[groups, n]``: head ``i`` of group ``g`` was its head ``e[g, i]``.
    """

    stage: ClassVar[str] = "queries"

    groups: int
    n: int

    @property
    def units(self) -> int:
        return self.groups * self.n

    def act(self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False) -> Tensor:
        first = self.n * torch.arange(self.groups, device=element.device)
        return Permutation(self.units).act((first[:, None] + element).flatten(), x, axis)

    def inverse(self, element: Tensor) -> Tensor:
        return torch.argsort(element, dim=1)

    def random(self, generator: torch.Generator) -> Tensor:
        return torch.stack([torch.randperm(self.n, generator=generator) for _ in range(self.groups)])

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return first.gather(1, second)

    def on_fisher(self, element: Tensor) -> Tensor:
        return element

    def moved(self, element: Tensor) -> Tensor:
        return (element.cpu() != torch.arange(self.n)).flatten()

    def angle(self, element: Tensor) -> float:
        return 0.0

    def contains(self, element: Tensor) -> bool:
        return element.shape[:1] == (self.groups,) and all(_is_order(row, self.n) for row in element)


@dataclass(frozen=True)
class HeadRotation:
    """``O(dim)`` in each of ``heads`` heads, reflections included; an element is ``[heads, dim, dim]``.

    On an axis of several times ``heads * dim`` entries, consecutive heads share an element: query heads
    that share a key head.

    Source: Zhang et al. 2025, Eq. 5 and Theorem 4.1 (orthogonal part of the head's symmetry).
    """

    stage: ClassVar[str] = "attention"

    heads: int
    dim: int

    @property
    def units(self) -> int:
        return self.heads

    def act(self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False) -> Tensor:
        if x.ndim == 2 and axis == 1 and x.shape[1] == self.heads * self.dim:
            # In place of the transposed matrix, which would be copied twice.
            heads = x.unflatten(1, (self.heads, self.dim)).transpose(0, 1)
            return (heads @ element.to(x).mT).transpose(0, 1).flatten(1)
        leading = x.movedim(axis, 0)
        blocks = leading.reshape(self.heads, -1, self.dim, leading[0].numel())
        return (element.to(x).unsqueeze(1) @ blocks).reshape(leading.shape).movedim(0, axis)

    def inverse(self, element: Tensor) -> Tensor:
        return element.mT

    def random(self, generator: torch.Generator) -> Tensor:
        shape = (self.heads, self.dim, self.dim)
        q, r = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))
        # The signs of R's diagonal make Q uniform on O(dim) instead of biased by Householder signs.
        return q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1)).unsqueeze(-2)

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return second @ first

    def on_fisher(self, element: Tensor) -> Tensor | None:
        ordered = ((element == 0) | (element.abs() == 1)).all()
        return element.abs() if bool(ordered) else None

    def moved(self, element: Tensor) -> Tensor:
        eye = torch.eye(self.dim, dtype=element.dtype, device=element.device)
        return (element - eye).abs().amax(dim=(-2, -1)) > 1e-6

    def angle(self, element: Tensor) -> float:
        cosine = torch.diagonal(element, dim1=-2, dim2=-1).mean(-1).clamp(-1, 1)
        return float(torch.rad2deg(torch.arccos(cosine)).mean())

    def contains(self, element: Tensor) -> bool:
        if not _is_real(element, (self.heads, self.dim, self.dim)):
            return False
        eye = torch.eye(self.dim, dtype=torch.float64, device=element.device)
        return bool(((element.double() @ element.double().mT - eye).abs() <= 1e-4).all())


@dataclass(frozen=True)
class HeadLinear(HeadRotation):
    """``GL(dim)`` in each head, all of the head's symmetry; an element is ``[heads, dim, dim]``.

    The contravariant side moves by the inverse transpose. Not an isometry: learned matching may use
    it, alignment in rounds does not, because it changes what weight decay and Adam see.

    Source: Zhang et al. 2025, Theorem 4.1.
    """

    def act(self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False) -> Tensor:
        return super().act(torch.linalg.inv(element).mT if contravariant else element, x, axis)

    def inverse(self, element: Tensor) -> Tensor:
        return torch.linalg.inv(element)

    def random(self, generator: torch.Generator) -> Tensor:
        shape = (self.heads, self.dim, self.dim)
        small = torch.randn(shape, generator=generator, dtype=torch.float64) / (2 * self.dim**0.5)
        return super().random(generator) @ torch.matrix_exp(small)

    def contains(self, element: Tensor) -> bool:
        if not _is_real(element, (self.heads, self.dim, self.dim)):
            return False
        return _is_moderate(torch.linalg.svdvals(element.double()))


@dataclass(frozen=True)
class _Rotary:
    """The rotary frequencies of ``heads`` key heads of ``dim`` units.

    Each frequency turns two coordinates: ``f`` and ``f + dim / 2``, or ``2 f`` and ``2 f + 1`` where
    they are ``interleaved``. Query heads that share a key head share its element.
    """

    stage: ClassVar[str] = "attention"

    heads: int
    dim: int
    interleaved: bool = False

    @property
    def units(self) -> int:
        return self.heads

    def pairs(self, rows: Tensor) -> Tensor:
        """Return the coordinates of ``[size, ...]``, ``[heads, shared, 2, dim / 2, rest]``."""
        rest = rows[0].numel()
        if self.interleaved:
            return rows.reshape(self.heads, -1, self.dim // 2, 2, rest).transpose(2, 3)
        return rows.reshape(self.heads, -1, 2, self.dim // 2, rest)

    def joined(self, pairs: Tensor, shape: torch.Size) -> Tensor:
        """Return coordinates from ``pairs`` as rows of this shape again."""
        return (pairs.transpose(2, 3) if self.interleaved else pairs).reshape(shape)


@dataclass(frozen=True)
class RotaryPhases(_Rotary):
    """One angle for each of the ``dim / 2`` rotary frequencies of ``heads`` key heads.

    All that rotary positions leave of a head's rotation on queries and keys. An element is
    ``[heads, dim / 2]`` in radians.

    Source: Su et al. 2021 (RoFormer), Eq. 34: what commutes with every rotary matrix.
    """

    def act(self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False) -> Tensor:
        leading = x.movedim(axis, 0)
        first, second = self.pairs(leading).unbind(2)
        cos, sin = (part.to(x)[:, None, :, None] for part in (element.cos(), element.sin()))
        turned = torch.stack([cos * first - sin * second, sin * first + cos * second], 2)
        return self.joined(turned, leading.shape).movedim(0, axis)

    def inverse(self, element: Tensor) -> Tensor:
        return -element

    def random(self, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(self.heads, self.dim // 2, generator=generator, dtype=torch.float64)
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
        return _is_real(element, (self.heads, self.dim // 2))

    def _turns(self, element: Tensor) -> Tensor:
        """Return angles between 0 and pi."""
        return torch.arccos(element.double().cos().clamp(-1, 1))


@dataclass(frozen=True)
class RotarySigns(_Rotary):
    """One sign for each rotary frequency of ``heads`` key heads, ``[heads, dim / 2]`` of 1 and -1.

    What a norm with gains on queries and keys leaves of ``RotaryPhases``.
    """

    def act(self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False) -> Tensor:
        leading = x.movedim(axis, 0)
        pairs = self.pairs(leading) * element.to(x)[:, None, None, :, None]
        return self.joined(pairs, leading.shape).movedim(0, axis)

    def inverse(self, element: Tensor) -> Tensor:
        return element

    def random(self, generator: torch.Generator) -> Tensor:
        return 2 * torch.randint(2, (self.heads, self.dim // 2), generator=generator) - 1

    def compose(self, second: Tensor, first: Tensor) -> Tensor:
        return second * first

    def on_fisher(self, element: Tensor) -> Tensor:
        return torch.ones_like(element)

    def moved(self, element: Tensor) -> Tensor:
        return (element < 0).any(1)

    def angle(self, element: Tensor) -> float:
        return 0.0

    def contains(self, element: Tensor) -> bool:
        right = element.dtype == torch.int64 and tuple(element.shape) == (self.heads, self.dim // 2)
        return right and bool((element.abs() == 1).all())


@dataclass(frozen=True)
class Rescale:
    """One non-zero factor per head; an element is ``[heads]``, the contravariant side is divided by it.

    Source: Zhang et al. 2025, Eq. 11.
    """

    stage: ClassVar[str] = "rescale"

    heads: int

    @property
    def units(self) -> int:
        return self.heads

    def act(self, element: Tensor, x: Tensor, axis: int, contravariant: bool = False) -> Tensor:
        factor = element.reciprocal() if contravariant else element
        per_row = factor.to(x).repeat_interleave(x.shape[axis] // self.heads)
        return x * per_row.reshape([-1 if d == axis else 1 for d in range(x.ndim)])

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

    def angle(self, element: Tensor) -> float:
        return 0.0

    def contains(self, element: Tensor) -> bool:
        return _is_real(element, (self.heads,)) and _is_moderate(element.abs())


#: The kinds that act inside heads; they have ``heads`` and ``dim``.
INSIDE_HEADS = (HeadRotation, RotaryPhases, RotarySigns)


def _is_order(element: Tensor, n: int) -> bool:
    right = element.dtype == torch.int64 and tuple(element.shape) == (n,)
    return right and bool((element.sort().values.cpu() == torch.arange(n)).all())


def _is_real(element: Tensor, shape: tuple[int, ...]) -> bool:
    right = element.dtype in (torch.float32, torch.float64) and tuple(element.shape) == shape
    return right and bool(torch.isfinite(element).all())


def _is_moderate(scales: Tensor) -> bool:
    return bool(((scales <= LARGEST_SCALE) & (scales >= 1 / LARGEST_SCALE)).all())
