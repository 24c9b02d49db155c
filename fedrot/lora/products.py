"""``ProductSum``: a weighted sum of products of factors, stored as factors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Terms below this share of the largest are rounding errors of float32.
SMALLEST = 1e-7
#: A sum of products is a rounding error if it is below this many times ``eps`` times
#: the sum of their norms. PEFT's initialisation ``orthogonal``, whose products are 0,
#: gives such sums.
ROUNDING = 10.0
#: A Cholesky factor replaces eigenvectors if its smallest pivot is above this share of
#: the largest. It takes a tenth of the time.
WELL_CONDITIONED = 1e-4
#: A stack begins with room for twice this number of products of the first product's
#: rank.
ROOM = 4
#: Number of columns that are copied to float64 at a time.
BLOCK = 1024


@dataclass(frozen=True)
class Terms:
    """The singular value decomposition of a sum of products.

    Attributes:
        u: ``[out, k]``.
        s: ``[n]``, descending; all singular values, also those without vectors (beyond
            ``k``).
        vt: ``[k, in]``.
    """

    u: Tensor
    s: Tensor
    vt: Tensor

    @property
    def norm(self) -> float:
        """The Frobenius norm of the sum."""
        return self.tail(0)

    def to(self, like: Tensor) -> Terms:
        """Return the terms in the dtype and on the device of a tensor."""
        return Terms(self.u.to(like), self.s.to(like), self.vt.to(like))

    def tail(self, rank: int) -> float:
        """Return the Frobenius norm of the terms beyond the first ``rank``."""
        return float(torch.linalg.vector_norm(self.s[rank:], dtype=torch.float64))

    def first(self, rank: int) -> Terms:
        """Return the first ``rank`` terms.

        Beyond the rank of the sum, singular values are 0. Their vectors are orthogonal
        to the others, or 0 if no orthogonal direction is left.
        """
        u, s, vt = self.u, self.s[: self.u.shape[1]], self.vt
        missing = rank - len(s)
        if missing > 0:
            u, vt = _extended(u, missing), _extended(vt.mT, missing).mT
            s = torch.cat([s, s.new_zeros(missing)])
        return Terms(u[:, :rank], s[:rank], vt[:rank])


class ProductSum:
    """The sum ``sum_i w_i B_i A_i`` as two stacked factors.

    When a product does not fit into ``2 * limit`` terms, the sum is replaced by its
    best approximation of rank ``limit`` (Eckart and Young). Sums of at most ``2 *
    limit`` terms are exact.

    Args:
        limit: the rank to keep; None keeps everything.

    Attributes:
        lost: upper bound of the Frobenius norm of the terms that compressions left out.
        left_out: this norm if the terms of different compressions are orthogonal to
            each other.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.lost = self.left_out = 0.0
        self._left, self._right = (
            torch.empty(0, 0),
            torch.empty(0, 0),
        )  # [terms, out], [terms, in]
        self._used = 0
        #: Singular values of the first terms, which are orthogonal; these are their
        #: squared norms.
        self._known = torch.empty(0)

    def add(self, b: Tensor, a: Tensor, weight: float) -> None:
        """Add ``weight * b @ a``; ``b`` is ``[out, rank]``, ``a`` is ``[rank, in]``."""
        rank = len(a)
        if (
            self.limit is not None
            and self._used + rank > 2 * self.limit
            and self._used > self.limit
        ):
            self._compress(self.limit)
        if self._used + rank > len(self._left):
            usual = 2 * max(self._used, ROOM * rank)
            room = max(
                min(usual, 2 * self.limit) if self.limit else usual, self._used + rank
            )
            self._left, self._right = (
                _enlarged(stack, self._used, room, like)
                for stack, like in ((self._left, b.mT), (self._right, a))
            )
        new = slice(self._used, self._used + rank)
        torch.mul(b.mT, weight, out=self._left[new])
        self._right[new] = a
        _balance(self._left[new], self._right[new])
        self._used += rank

    def terms(self, most: int | None = None) -> Terms:
        """Return the decomposition of the sum, with the vectors of its first terms."""
        left, right = self.stacks
        return decomposed(left.mT, right, self._known, most)

    def distances(self, *factors: tuple[Tensor, Tensor]) -> list[float]:
        """Return the Frobenius norm of the difference between the sum and each ``b @
        a``.

        The error is below 1e-8 of the norm of the added products.
        """
        left, right = self.stacks
        own, found = (_inner(left, left) * _inner(right, right)).sum(), []
        for b, a in factors:
            mixed = (_inner(left, b.mT) * _inner(right, a)).sum()
            other = (_inner(b.mT, b.mT) * _inner(a, a)).sum()
            found.append(float((own - 2 * mixed + other).clamp(min=0).sqrt()))
        return found

    @property
    def stacks(self) -> tuple[Tensor, Tensor]:
        """The factors ``L [terms, out]`` and ``R [terms, in]`` of the sum ``L^T R``; no
        copies.
        """
        return self._left[: self._used], self._right[: self._used]

    def _compress(self, rank: int) -> None:
        kept = self.terms(rank)
        tail = kept.tail(rank)
        self.lost, self.left_out = self.lost + tail, math.hypot(self.left_out, tail)
        self._used, self._known = len(kept.vt), kept.s[:rank]
        root = self._known.sqrt()[:, None]
        torch.mul(kept.u.mT, root, out=self._left[: self._used])
        torch.mul(kept.vt, root, out=self._right[: self._used])


def _balance(left: Tensor, right: Tensor) -> None:
    """Scale each row of both stacks to about the same norm, by powers of two, which are
    exact.

    Otherwise the rows of a client with a huge ``B`` and a tiny ``A`` would hide all
    other rows.
    """
    ours, theirs = _norms(left), _norms(right)
    ratio = torch.where((ours > 0) & (theirs > 0), theirs / ours, 1.0)
    factor = torch.exp2((ratio.log2() / 2).round()).to(left)[:, None]
    left.mul_(factor)
    right.div_(factor)


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def _enlarged(stack: Tensor, used: int, room: int, like: Tensor) -> Tensor:
    """Return a copy of a stack's used rows in a larger stack, in the dtype and width of
    ``like``.
    """
    found = like.new_empty(room, like.shape[1])
    if used:
        found[:used] = stack[:used]
    return found


def decomposed(
    left: Tensor, right: Tensor, known: Tensor | None = None, most: int | None = None
) -> Terms:
    """Return the singular value decomposition of ``left @ right``, without forming the
    product.

    All singular values are 0 if the product is a rounding error of its terms. There are
    no singular values if the terms are too small for float32.

    Args:
        left: ``[out, k]``.
        right: ``[k, in]``.
        known: singular values of the first terms, as many as there are values. Their
            columns of ``left`` and rows of ``right`` are orthogonal, and the values are
            the squared norms.
        most: maximum number of terms with vectors; None for all.
    """
    norms = _norms(left.mT) * _norms(right)
    if not float(norms.sum()) > torch.finfo(torch.float32).tiny:
        return Terms(left[:, :0], left.new_empty(0), right[:0])
    narrow = left.shape[1] <= min(len(left), right.shape[1])
    if narrow and left.dtype == torch.float32:
        known = left.new_empty(0) if known is None else known.to(left)
        found = _by_gram(left, right, known.double(), most)
    else:
        found = _by_qr(left, right, most)
    if found.norm <= ROUNDING * torch.finfo(left.dtype).eps * float(norms.sum()):
        return Terms(found.u, torch.zeros_like(found.s), found.vt)
    return found


def _by_qr(left: Tensor, right: Tensor, most: int | None) -> Terms:
    q, r = torch.linalg.qr(left)
    p, t = torch.linalg.qr(right.mT)
    u, s, vt = torch.linalg.svd(r @ t.mT, full_matrices=False)
    return Terms(q @ u[:, :most], s, vt[:most] @ p.mT)


def _by_gram(left: Tensor, right: Tensor, known: Tensor, most: int | None) -> Terms:
    """Decompose float32 stacks by their Gram matrices in float64, several times faster
    than by QR.

    With ``left = Q R``, the singular values of ``R right`` are those of the product.
    Their error is below 1e-7 of the largest, the precision of float32. Smaller terms
    are left out.
    """
    r, inverse = _root(_gram(left.mT, known))
    if not len(r):
        return Terms(left[:, :0], left.new_empty(0), right[:0])
    squares, p = torch.linalg.eigh(r @ _gram(right, known) @ r.mT)
    s, p = squares.clamp(min=0).sqrt().flip(0), p.flip(1)
    kept = s > s[0] * SMALLEST
    s, first = s[kept], p[:, kept][:, :most]
    u = left @ (inverse @ first).to(left)
    vt = (first.mT @ r / s[:most, None]).to(right) @ right
    return Terms(u, s.to(left), vt)


def _root(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``R`` with ``R^T R = gram`` and its inverse, without directions of
    rounding errors.
    """
    lower, failed = torch.linalg.cholesky_ex(gram)
    pivots = lower.diagonal()
    if not failed and pivots.min() > WELL_CONDITIONED * pivots.max():
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return lower.mT, torch.linalg.solve_triangular(lower.mT, identity, upper=True)
    values, vectors = torch.linalg.eigh(gram)
    there = values > values[-1] * SMALLEST**2
    values, vectors = values[there].flip(0).sqrt(), vectors[:, there].flip(1)
    return values[:, None] * vectors.mT, vectors / values


def _gram(rows: Tensor, known: Tensor) -> Tensor:
    """Return ``X X^T`` in float64, given the squared norms of the first rows, which are
    orthogonal.
    """
    count = len(known)
    new = _inner(rows[count:], rows)
    gram = torch.block_diag(torch.diag(known), new[:, count:])
    gram[count:, :count] = new[:, :count]
    gram[:count, count:] = new[:, :count].mT
    return gram


def _inner(rows: Tensor, others: Tensor) -> Tensor:
    """Return ``rows @ others^T`` in float64, converting ``BLOCK`` columns at a time."""
    found = rows.new_zeros(len(rows), len(others), dtype=torch.float64)
    for one, other in zip(rows.split(BLOCK, 1), others.split(BLOCK, 1), strict=True):
        found.addmm_(one.double(), other.double().mT)
    return found


def _extended(basis: Tensor, count: int) -> Tensor:
    """Return orthonormal columns with ``count`` more, the same in every run; zeros if
    none are left.
    """
    room = min(count, len(basis) - basis.shape[1])
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(basis), room, generator=generator, dtype=torch.float64).to(
        basis
    )
    for _ in range(2):  # Twice is enough for orthogonality in floating point.
        drawn = torch.linalg.qr(drawn - basis @ (basis.mT @ drawn))[0]
    return torch.cat([basis, drawn, basis.new_zeros(len(basis), count - room)], 1)
