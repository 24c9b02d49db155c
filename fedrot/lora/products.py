"""``ProductSum``: a weighted sum of products of factors, which is never formed."""

from __future__ import annotations

import torch
from torch import Tensor


class ProductSum:
    """The sum ``sum_i w_i B_i A_i`` as two stacked factors of bounded rank.

    When the stack has more than twice ``limit`` columns, its best approximation of rank ``limit`` takes
    its place (Eckart and Young, by QR of both stacks and the SVD of a small core). Without a limit, or
    as long as all ranks together stay below it, the sum is exact.

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
            u, s, vt = self._decomposed()
            self.lost += float(torch.linalg.vector_norm(s[self.limit :]))
            self._left = [u[:, : self.limit] * s[: self.limit]]
            self._right = [vt[: self.limit]]

    def svd(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first terms of the sum: ``U [out, rank]``, ``S [rank]``, ``V^T [rank, in]``.

        Beyond the rank of the sum, singular values are 0. Their vectors are orthogonal to the others as
        long as there is room, and 0 then.
        """
        u, s, vt = self._decomposed()
        missing = rank - len(s)
        if missing > 0:
            u, vt = _extended(u, missing), _extended(vt.mT, missing).mT
            s = torch.cat([s, s.new_zeros(missing)])
        return u[:, :rank], s[:rank], vt[:rank]

    def norm(self) -> float:
        """Return the Frobenius norm of the sum."""
        left, right = torch.cat(self._left, 1).double(), torch.cat(self._right).double()
        return _norm(left, right)

    def distance(self, b: Tensor, a: Tensor) -> float:
        """Return the Frobenius norm of the difference between the sum and ``b @ a``."""
        left = torch.cat([*self._left, -b], 1).double()
        return _norm(left, torch.cat([*self._right, a]).double())

    def _decomposed(self) -> tuple[Tensor, Tensor, Tensor]:
        q, r = torch.linalg.qr(torch.cat(self._left, 1))
        p, t = torch.linalg.qr(torch.cat(self._right).mT)
        u, s, vt = torch.linalg.svd(r @ t.mT, full_matrices=False)
        return q @ u, s, vt @ p.mT


def _norm(left: Tensor, right: Tensor) -> float:
    return float(torch.linalg.vector_norm(torch.linalg.qr(left, mode="r").R @ right))


def _extended(basis: Tensor, count: int) -> Tensor:
    """Return orthonormal columns with ``count`` more, always the same; zeros where there is no room."""
    room = min(count, len(basis) - basis.shape[1])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(basis), room, generator=generator, dtype=torch.float64).to(basis)
    for _ in range(2):  # Twice is enough for orthogonality in floating point.
        drawn = torch.linalg.qr(drawn - basis @ (basis.mT @ drawn))[0]
    return torch.cat([basis, drawn, basis.new_zeros(len(basis), count - room)], 1)
