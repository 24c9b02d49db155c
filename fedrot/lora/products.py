"""``ProductSum``: a weighted sum of products of factors, which is never formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Terms below this share of the largest are rounding errors of float32.
SMALLEST = 1e-8


@dataclass(frozen=True)
class Terms:
    """The singular value decomposition of a sum of products.

    Attributes:
        u: ``[out, k]``.
        s: ``[k]``, descending.
        vt: ``[k, in]``.
    """

    u: Tensor
    s: Tensor
    vt: Tensor

    @property
    def norm(self) -> float:
        """The Frobenius norm of the sum."""
        return self.tail(0)

    def tail(self, rank: int) -> float:
        """Return the Frobenius norm of the terms beyond the first ``rank``."""
        return float(torch.linalg.vector_norm(self.s[rank:], dtype=torch.float64))

    def first(self, rank: int) -> Terms:
        """Return the first ``rank`` terms.

        Beyond the rank of the sum, singular values are 0. Their vectors are orthogonal to the others as
        long as there is room, and 0 then.
        """
        u, s, vt = self.u, self.s, self.vt
        missing = rank - len(s)
        if missing > 0:
            u, vt = _extended(u, missing), _extended(vt.mT, missing).mT
            s = torch.cat([s, s.new_zeros(missing)])
        return Terms(u[:, :rank], s[:rank], vt[:rank])

    def distance(self, b: Tensor, a: Tensor) -> float:
        """Return the Frobenius norm of the difference between the sum and ``b @ a``."""
        left, right = torch.cat([self.u * self.s, -b], 1), torch.cat([self.vt, a])
        return decomposed(left, right).norm


class ProductSum:
    """The sum ``sum_i w_i B_i A_i`` as two stacked factors of bounded rank.

    When the stacks have more than twice ``limit`` columns, the sum's best approximation of rank
    ``limit`` takes their place (Eckart and Young). Without a limit, or as long as all ranks together
    stay below it, the sum is exact.

    Args:
        limit: the rank to keep; None keeps everything.

    Attributes:
        lost: upper bound of the Frobenius norm of what compressions left out.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.lost = 0.0
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []

    def add(self, b: Tensor, a: Tensor, weight: float) -> None:
        """Add ``weight * b @ a``; ``b`` is ``[out, rank]``, ``a`` is ``[rank, in]``."""
        self._left.append(b * weight)
        self._right.append(a)
        if self.limit is not None and sum(b.shape[1] for b in self._left) > 2 * self.limit:
            terms = self.terms()
            self.lost += terms.tail(self.limit)
            kept = terms.first(min(self.limit, len(terms.s)))
            self._left, self._right = [kept.u * kept.s], [kept.vt.clone()]

    def terms(self) -> Terms:
        """Return the decomposition of the sum."""
        return decomposed(torch.cat(self._left, 1), torch.cat(self._right))


def decomposed(left: Tensor, right: Tensor) -> Terms:
    """Return the singular value decomposition of ``left @ right``, which is not formed.

    Args:
        left: ``[out, k]``.
        right: ``[k, in]``.
    """
    narrow = left.shape[1] <= min(len(left), right.shape[1])
    return _by_gram(left, right) if narrow and left.dtype == torch.float32 else _by_qr(left, right)


def _by_qr(left: Tensor, right: Tensor) -> Terms:
    q, r = torch.linalg.qr(left)
    p, t = torch.linalg.qr(right.mT)
    u, s, vt = torch.linalg.svd(r @ t.mT, full_matrices=False)
    return Terms(q @ u, s, vt @ p.mT)


def _by_gram(left: Tensor, right: Tensor) -> Terms:
    """Decompose float32 stacks by their Gram matrices in float64, several times faster than by QR.

    Singular values are right to 1e-8 of the largest, which is beyond the precision of float32. Smaller
    terms are left out.
    """
    wide, tall = left.double(), right.double()
    (x, to_q), (y, to_p) = map(_root, (wide.mT @ wide, tall @ tall.mT))
    u, s, vt = torch.linalg.svd(x.mT @ y)
    kept = s > s[0] * SMALLEST
    u, s, vt = u[:, kept], s[kept], vt[kept]
    return Terms(left @ (to_q @ u).to(left), s.to(left), (vt @ to_p.mT).to(left) @ right)


def _root(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``X`` with ``X X^T = G``, and the matrix that makes the stack's columns orthonormal."""
    values, vectors = torch.linalg.eigh(gram)
    there = values > values[-1] * SMALLEST**2
    root = torch.where(there, values, 0.0).sqrt()
    return vectors * root, vectors * torch.where(there, 1 / root, 0.0)


def _extended(basis: Tensor, count: int) -> Tensor:
    """Return orthonormal columns with ``count`` more, always the same; zeros where there is no room."""
    room = min(count, len(basis) - basis.shape[1])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(basis), room, generator=generator, dtype=torch.float64).to(basis)
    for _ in range(2):  # Twice is enough for orthogonality in floating point.
        drawn = torch.linalg.qr(drawn - basis @ (basis.mT @ drawn))[0]
    return torch.cat([basis, drawn, basis.new_zeros(len(basis), count - room)], 1)
