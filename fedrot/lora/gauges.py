"""Gauges: the choice among the pairs of factors that have the same product.

Adam updates the factors, not their product. Two pairs with the same product therefore
train differently, so the choice is a part of the aggregation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, linalg

from fedrot.matching.procrustes import polar

#: Largest ratio of the squared norms of ``keep-a``'s factors to those of the factors
#: that it keeps close to. With a large ``B``, one step of Adam in ``A`` changes the
#: product too much.
LARGEST_GROWTH = 2.0

Factors = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Wanted:
    """A product of bounded rank, and the factors that a gauge may keep close to.

    Attributes:
        u, s, vt: the terms of the product, ``[out, rank]``, ``[rank]``, ``[rank, in]``.
        mean: the clients' mean factors ``A [rank, in]``, ``B [out, rank]``, None if
            their ranks differ.
        previous: the factors that the clients received, None if unknown or of another
            rank.
    """

    u: Tensor
    s: Tensor
    vt: Tensor
    mean: Factors | None
    previous: Factors | None

    @property
    def transposed(self) -> Wanted:
        """The same for the transposed product, whose factors are ``B^T`` and ``A^T``.

        In directions that the product does not use, a gauge keeps ``A`` and sets ``B``
        to 0, as at LoRA's start. Adapters of embeddings are transposed, because they
        start with ``A = 0``.
        """
        mean = self.mean and transposed(self.mean)
        previous = self.previous and transposed(self.previous)
        return Wanted(self.vt.mT, self.s, self.u.mT, mean, previous)


def transposed(factors: Factors) -> Factors:
    """Return the factors of the transposed product."""
    return factors[1].mT, factors[0].mT


#: A choice among the pairs of factors with the same product.
Gauge = Callable[[Wanted], Factors]


def gauged(gauge: Gauge, of: Wanted, of_embedding: bool) -> Factors:
    """Return a gauge's factors; for an embedding, those of the transposed product."""
    return transposed(gauge(of.transposed)) if of_embedding else gauge(of)


def balanced(of: Wanted) -> Factors:
    """Return ``A = sqrt(S) V^T`` and ``B = U sqrt(S)``, factors of equal norm.

    If the rank of the product is smaller than that of the factors, the remaining
    columns of ``B`` are 0. The remaining rows of ``A`` come from the part of the old
    ``A`` outside of the product's row space, because a direction in which both are 0
    would never be trained again. The largest entry of each row of ``A`` is positive, so
    that the factors do not depend on the signs of a decomposition.
    """
    u, s, vt = _terms(of)
    kept = of.mean or of.previous
    root = s.sqrt()
    if kept is None:
        size = root.mean() if len(root) else 1.0
        rest = of.vt[len(s) :] * size
    else:
        _, outside, directions = _around(kept[0], vt)
        rest = directions[:, len(s) :].mT @ outside
    a = torch.cat([root[:, None] * vt, rest])
    unused = u.new_zeros(len(u), len(rest))
    b = torch.cat([u * root, unused], 1)
    signs = a.gather(1, a.abs().argmax(1, keepdim=True)).sign()
    return signs * a, signs.mT * b


def _terms(of: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """Return the terms with nonzero singular values."""
    s = of.s
    rounding = s[0] * torch.finfo(s.dtype).eps * len(s)
    there = s > rounding
    return of.u[:, there], s[there], of.vt[there]


def _around(a: Tensor, vt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``A V``, and the part of ``A`` outside of the row space, with vectors.

    The left singular vectors of this part are ``[rank, rank]``, in ascending order of
    the singular values.
    """
    inside = a @ vt.mT
    outside = a - inside @ vt
    wide = outside.double()
    _, vectors = linalg.eigh(wide @ wide.mT)
    return inside, outside, vectors.to(a)


def rotated(factors: Factors, to: Factors | None) -> Factors:
    """Return ``R A`` and ``B R^T``, rotated as near as possible to the factors ``to``.

    Without ``to``, factors stay as they are. ``R = polar(A_to A^T + B_to^T B)`` is the
    best rotation for both factors together. The best rotation for one factor may be
    noise: after a short training ``B`` is nearly 0.
    """
    if to is None:
        return factors
    a, b = factors
    a_to, b_to = to
    products = a_to @ a.mT + b_to.mT @ b
    r = polar(products.double()).to(a)
    return r @ a, b @ r.mT


def near_mean(of: Wanted) -> Factors:
    """Return balanced factors, rotated to the mean, else to the received ones."""
    return rotated(balanced(of), of.mean or of.previous)


def near_previous(of: Wanted) -> Factors:
    """Return balanced factors, rotated to the received ones, else to the mean."""
    return rotated(balanced(of), of.previous or of.mean)


def keep_a(of: Wanted) -> Factors:
    """Return the factors whose ``A`` is nearest to the clients' mean ``A``.

    The row space of ``A`` must contain that of the product, of rank ``k``. The nearest
    ``A`` is the mean without the ``k`` smallest singular directions ``Z`` of its part
    outside of this row space: ``A = A_mean - Z Z^T A_mean (I - V V^T)``, and ``B = U S
    (Z^T A_mean V)^-1 Z^T``. If ``k`` is the rank of the factors, this is ``A = A_mean V
    V^T``. If the clients' ranks differ, ``A_mean`` is the ``A`` that they received. If
    the mean ``A`` is nearly orthogonal to the product's row space, the inverse makes
    ``B`` large; beyond ``LARGEST_GROWTH`` the factors are those of ``near_mean``.
    """
    kept = of.mean or of.previous
    if kept is None:
        return balanced(of)
    u, s, vt = _terms(of)
    a_kept, _ = kept
    inside, outside, directions = _around(a_kept, vt)
    dropped = directions[:, : len(s)]
    kernel = dropped.mT
    left, singular, right = linalg.svd((kernel @ inside).double())
    if len(s) and not singular[-1] > torch.finfo(s.dtype).eps * singular[0]:
        return near_mean(of)
    inverse = ((right.mT / singular) @ left.mT).to(u)
    a = a_kept - dropped @ (kernel @ outside)
    b = (u * s) @ inverse @ kernel
    bounded = _size((a, b)) <= LARGEST_GROWTH * _size(kept)
    return (a, b) if bounded else near_mean(of)


def _size(of: Factors) -> float:
    return sum(float(linalg.vector_norm(factor)) ** 2 for factor in of)


#: The gauges by name. Plug-ins add theirs.
GAUGES: dict[str, Gauge] = {
    "keep-a": keep_a,
    "previous": near_previous,
    "none": balanced,
}
