"""``ProductSum``: a weighted sum of products of factors, stored as factors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, linalg

from fedrot.tensors import identity

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
#: The singular values of no terms.
_NO_VALUES = torch.empty(0)


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

    def tail(self, rank: int) -> float:
        """Return the Frobenius norm of the terms beyond the first ``rank``."""
        return float(linalg.vector_norm(self.s[rank:], dtype=torch.float64))

    def first(self, rank: int) -> Terms:
        """Return the first ``rank`` terms.

        Beyond the rank of the sum, singular values are 0. Their vectors are orthogonal
        to the others, or 0 if no orthogonal direction is left.
        """
        u = self.u
        s = self.s[: u.shape[1]]
        vt = self.vt
        missing = rank - len(s)
        if missing > 0:
            u = _extended(u, missing)
            vt = _extended(vt.mT, missing).mT
            s = torch.cat([s, s.new_zeros(missing)])
        return Terms(u[:, :rank], s[:rank], vt[:rank])


class ProductSum:
    """The sum ``sum_i w_i B_i A_i`` as two stacked factors.

    When a product does not fit into ``2 * limit`` terms, the sum is replaced by its
    best approximation of rank ``limit`` (Eckart and Young). Sums of at most ``2 *
    limit`` terms are exact.

    Args:
        limit: the rank to keep; a larger one may be set later.

    Attributes:
        lost: upper bound of the Frobenius norm of the terms that compressions left out.
        left_out: this norm if the terms of different compressions are orthogonal to
            each other.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lost = self.left_out = 0.0
        #: The stacks ``[terms, out]`` and ``[terms, in]``.
        self._left = self._right = torch.empty(0, 0)
        self._used = 0
        #: Singular values of the first terms, which are orthogonal: the squared norms
        #: of their rows.
        self._known = _NO_VALUES

    def add(self, b: Tensor, a: Tensor, weight: float) -> None:
        """Add ``weight * b @ a``; ``b`` is ``[out, rank]``, ``a`` is ``[rank, in]``."""
        rank = len(a)
        limit = self.limit
        if self._used > limit and self._used + rank > 2 * limit:
            self._compress(limit)
        used = self._used
        stop = used + rank
        if stop > len(self._left):
            room = 2 * min(max(used, ROOM * rank), limit)
            room = max(room, stop)
            self._left = _enlarged(self._left, used, room, b.mT)
            self._right = _enlarged(self._right, used, room, a)
        left = self._left[used:stop]
        right = self._right[used:stop]
        torch.mul(b.mT, weight, out=left)
        right.copy_(a)
        _balance(left, right)
        self._used = stop

    def terms(self, most: int | None = None) -> Terms:
        """Return the decomposition of the sum, with the vectors of its first terms."""
        left, right = self.stacks
        return decomposed(left.mT, right, self._known, most)

    def distances(self, *factors: tuple[Tensor, Tensor]) -> list[float]:
        """Return the Frobenius norms of the sum minus each ``b @ a``.

        The error is below 1e-8 of the norm of the added products.
        """
        left, right = self.stacks
        squared = (_inner(left, left) * _inner(right, right)).sum()
        distances = []
        for b, a in factors:
            columns = b.mT
            mixed = (_inner(left, columns) * _inner(right, a)).sum()
            other = (_inner(columns, columns) * _inner(a, a)).sum()
            # Rounding errors may make it negative.
            distance = (squared - 2 * mixed + other).clamp(min=0)
            distances.append(float(distance.sqrt()))
        return distances

    @property
    def stacks(self) -> tuple[Tensor, Tensor]:
        """The factors ``L [terms, out]``, ``R [terms, in]`` of ``L^T R``; no copies."""
        return self._left[: self._used], self._right[: self._used]

    def _compress(self, rank: int) -> None:
        kept = self.terms(rank)
        tail = kept.tail(rank)
        self.lost += tail
        self.left_out = math.hypot(self.left_out, tail)
        self._used = len(kept.vt)
        self._known = kept.s[:rank]
        root = self._known.sqrt()[:, None]
        left, right = self.stacks
        torch.mul(kept.u.mT, root, out=left)
        torch.mul(kept.vt, root, out=right)


def _balance(left: Tensor, right: Tensor) -> None:
    """Scale each row of both stacks to about the same norm.

    Powers of two are exact. Without scaling, the rows of a client with a huge ``B`` and
    a tiny ``A`` would hide all other rows.
    """
    of_left = _norms(left)
    of_right = _norms(right)
    used = (of_left > 0) & (of_right > 0)
    ratio = torch.where(used, of_right / of_left, 1.0)
    power = (ratio.log2() / 2).round()
    factor = torch.exp2(power).to(left)[:, None]
    left.mul_(factor)
    right.div_(factor)


def _norms(rows: Tensor) -> Tensor:
    return linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def _enlarged(stack: Tensor, used: int, room: int, like: Tensor) -> Tensor:
    """Return a stack's used rows in a larger stack, with ``like``'s dtype and width."""
    enlarged = like.new_empty(room, like.shape[1])
    # Before the first product the stack has no width.
    if used:
        enlarged[:used] = stack[:used]
    return enlarged


def decomposed(
    left: Tensor,
    right: Tensor,
    known: Tensor = _NO_VALUES,
    most: int | None = None,
) -> Terms:
    """Return the singular value decomposition of ``left @ right``.

    The product is not formed. All singular values are 0 if the product is a rounding
    error of its terms. There are no singular values if the terms are too small for
    float32.

    Args:
        left: ``[out, k]``.
        right: ``[k, in]``.
        known: singular values of the first terms, as many as there are values. Their
            columns of ``left`` and rows of ``right`` are orthogonal, and the values are
            the squared norms.
        most: maximum number of terms with vectors; None for all.
    """
    norms = float((_norms(left.mT) * _norms(right)).sum())
    if not norms > torch.finfo(torch.float32).tiny:
        return Terms(left[:, :0], left.new_empty(0), right[:0])
    narrow = left.shape[1] <= min(len(left), right.shape[1])
    if narrow and left.dtype == torch.float32:
        terms = _by_gram(left, right, known.to(left).double(), most)
    else:
        terms = _by_qr(left, right, most)
    if terms.norm <= ROUNDING * torch.finfo(left.dtype).eps * norms:
        return Terms(terms.u, torch.zeros_like(terms.s), terms.vt)
    return terms


def _by_qr(left: Tensor, right: Tensor, most: int | None) -> Terms:
    q, r = linalg.qr(left)
    p, t = linalg.qr(right.mT)
    u, s, vt = linalg.svd(r @ t.mT, full_matrices=False)
    return Terms(q @ u[:, :most], s, vt[:most] @ p.mT)


def _by_gram(left: Tensor, right: Tensor, known: Tensor, most: int | None) -> Terms:
    """Decompose float32 stacks by their Gram matrices in float64.

    This is several times faster than by QR. With ``left = Q R``, the singular values of
    ``R right`` are those of the product. Their error is below 1e-7 of the largest, the
    precision of float32. Smaller terms are left out.
    """
    r, inverse = _root(_gram(left.mT, known))
    if not len(r):
        return Terms(left[:, :0], left.new_empty(0), right[:0])
    gram = r @ _gram(right, known) @ r.mT
    squares, vectors = linalg.eigh(gram)
    # eigh sorts in ascending order.
    s = squares.clamp(min=0).sqrt().flip(0)
    p = vectors.flip(1)
    kept = s > s[0] * SMALLEST
    s = s[kept]
    first = p[:, kept][:, :most]
    u = left @ (inverse @ first).to(left)
    rows = first.mT @ r / s[:most, None]
    return Terms(u, s.to(left), rows.to(right) @ right)


def _root(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``R`` with ``R^T R = gram`` and its inverse.

    Directions of rounding errors are left out.
    """
    lower, failed = linalg.cholesky_ex(gram)
    pivots = lower.diagonal()
    if not failed and pivots.min() > WELL_CONDITIONED * pivots.max():
        upper = lower.mT
        return upper, linalg.solve_triangular(upper, identity(gram), upper=True)
    values, vectors = linalg.eigh(gram)
    there = values > values[-1] * SMALLEST**2
    roots = values[there].flip(0).sqrt()
    vectors = vectors[:, there].flip(1)
    return roots[:, None] * vectors.mT, vectors / roots


def _gram(rows: Tensor, known: Tensor) -> Tensor:
    """Return ``X X^T`` in float64.

    The first rows are orthogonal; ``known`` are their squared norms.
    """
    count = len(known)
    new = _inner(rows[count:], rows)
    gram = new.new_zeros(len(rows), len(rows))
    gram.diagonal()[:count] = known
    gram[:, count:] = new.mT
    gram[count:] = new
    return gram


def _inner(rows: Tensor, others: Tensor) -> Tensor:
    """Return ``rows @ others^T`` in float64, converting ``BLOCK`` columns at a time."""
    product = rows.new_zeros(len(rows), len(others), dtype=torch.float64)
    blocks = zip(rows.split(BLOCK, 1), others.split(BLOCK, 1), strict=True)
    for block, other in blocks:
        product.addmm_(block.double(), other.double().mT)
    return product


def _extended(basis: Tensor, count: int) -> Tensor:
    """Return orthonormal columns with ``count`` more; zeros if no more are left."""
    length, width = basis.shape
    room = min(count, length - width)
    # The same in every run.
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(length, room, generator=generator, dtype=torch.float64).to(
        basis
    )
    # Twice is enough for orthogonality in floating point.
    for _ in range(2):
        drawn, _ = linalg.qr(drawn - basis @ (basis.mT @ drawn))
    return torch.cat([basis, drawn, basis.new_zeros(length, count - room)], 1)
