"""Sketches of Gram matrices: a factor of low rank and the exact diagonal, in a bounded number of bytes.

A matrix ``G`` with the diagonal ``g`` is scaled to the diagonal 1, ``C = D^-1 G D^-1`` with
``D = diag(sqrt(g))``, and becomes ``D (F F^T + diag(1 - |F_j|^2)) D``, where ``F`` ``[n, r]`` is made of
the ``r`` largest eigenpairs of ``C``. Rows of ``F`` are no longer than 1, so that the sketch is positive
semi-definite. Its diagonal is that of ``G``.

Error. Let ``l_1 >= ... >= l_n`` be the eigenvalues of ``C``, and ``E`` the difference between ``C`` and
its sketch. The remainder ``R = C - F F^T`` is positive semi-definite, and ``E`` is ``R`` without its
diagonal. So ``|E| <= l_(r+1)`` in the spectral norm, and ``|E|_F^2 <= l_(r+1)^2 + ... + l_n^2``. The
rounding of ``F`` to float16 adds at most ``2^-9 sqrt(n l_1)`` to both norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.collect.statistics import LARGEST
from fedrot.errors import FedrotError

#: Precision of a factor, whose entries are -1 to 1: eight times as fine as bfloat16.
FACTOR = torch.float16
#: Squares of a row of a factor may exceed 1 by this much, from rounding.
_LONGER = 2**-9


@dataclass(frozen=True)
class GramSketch:
    """A sketch of a Gram matrix of ``n`` inputs.

    Attributes:
        factor: ``F``, float16 ``[n, r]``.
        diagonal: of the matrix, ``[n]``.
    """

    factor: Tensor
    diagonal: Tensor

    def problem(self) -> str | None:
        """Return which values are impossible ("a diagonal with ..."), None if none are."""
        if not bool(((self.diagonal >= 0) & (self.diagonal <= LARGEST)).all()):
            return f"a diagonal with entries that are not 0 to {LARGEST:g}"
        if not bool((self._squares() <= 1 + _LONGER).all()):
            return "rows that are longer than 1 or not finite"
        return None

    def _squares(self) -> Tensor:
        return self.factor.float().square().sum(1)

    def explained(self) -> Tensor:
        """Return the share of the trace of ``C`` that each column explains, ``[r]``, the largest first.

        The trace is the energy of the inputs, at equal energies of the units.
        """
        return self.factor.float().square().sum(0) / len(self.factor)

    def cut(self, rank: int) -> GramSketch:
        """Return a sketch of a smaller rank."""
        return GramSketch(self.factor[:, :rank].clone(), self.diagonal)

    def matrix(self) -> Tensor:
        """Return the matrix of the sketch, float32 ``[n, n]``."""
        rows = self.factor.float() * self._squares().clamp_min(1).rsqrt().unsqueeze(1)
        rows = rows * self.diagonal.float().sqrt().unsqueeze(1)
        found = rows @ rows.mT
        found.diagonal().copy_(self.diagonal)
        return found


def sketched(gram: Tensor, rank: int | None = None) -> GramSketch:
    """Return the sketch of a Gram matrix.

    Args:
        gram: floating-point ``[n, n]``; decomposed in float32 on its device.
        rank: 0 to ``n``; 0 keeps the diagonal, None is ``n``.

    Raises:
        FedrotError: the matrix is not finite, or its diagonal is negative.
    """
    diagonal = gram.detach().diagonal()
    if not bool(torch.isfinite(gram).all()) or bool((diagonal < 0).any()):
        raise FedrotError(
            "holds NaN, Inf or a negative mean square, so it has no eigenvalues to sketch it by. Check "
            "the client's training before sending it."
        )
    values, vectors = torch.linalg.eigh(scaled(gram).float())
    factor = (vectors * values.clamp_min(0).sqrt()).flip(1)[:, :rank]
    # Rows are too long where rounding has made an eigenvalue of the given matrix negative.
    lengths = torch.linalg.vector_norm(factor, dim=1, keepdim=True)
    factor = factor / torch.where(lengths > 1 + 2**-12, lengths, 1.0)
    return GramSketch(factor.to(FACTOR).cpu(), diagonal.float().cpu().clone())


def scaled(gram: Tensor) -> Tensor:
    """Return a Gram matrix scaled to the diagonal 1, float64; 0 where the matrix is 0."""
    wide = gram.detach().double()
    roots = wide.diagonal().sqrt()
    inverse = torch.where(roots > 0, 1 / roots, 0.0)
    return inverse.unsqueeze(1) * wide * inverse
