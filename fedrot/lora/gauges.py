"""Gauges: which of all factors with one product a model is given.

Adam moves the factors, not their product. Two pairs of factors with one product therefore train
differently, and the choice is a part of the aggregation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.matching.procrustes import polar

#: ``keep-a`` gives no factors whose squared norms sum to more than this many times those of the factors
#: that it follows. With a large ``B`` one step of Adam in ``A`` changes the product too much.
LARGEST_GROWTH = 2.0

Factors = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Wanted:
    """A product of bounded rank, and the factors that a gauge may follow.

    Attributes:
        u, s, vt: the terms of the product, ``[out, rank]``, ``[rank]``, ``[rank, in]``.
        mean: the clients' mean factors ``A [rank, in]``, ``B [out, rank]``, None if their ranks differ.
        previous: the factors that the clients received, None if unknown or of another rank.
        of_embedding: whether this is the transposed product of an embedding.
    """

    u: Tensor
    s: Tensor
    vt: Tensor
    mean: Factors | None
    previous: Factors | None
    of_embedding: bool = False

    @property
    def transposed(self) -> Wanted:
        """The same for the transposed product, whose factors are ``B^T`` and ``A^T``.

        A gauge takes the directions that the product does not need from ``A``, and ``B`` is 0 there, as
        at LoRA's start. Adapters of embeddings start the other way round: ``A`` is 0.
        """
        mean, previous = (f and transposed(f) for f in (self.mean, self.previous))
        return Wanted(self.vt.mT, self.s, self.u.mT, mean, previous, True)


def transposed(factors: Factors) -> Factors:
    """Return the factors of the transposed product."""
    return factors[1].mT, factors[0].mT


def balanced(of: Wanted) -> Factors:
    """Return ``A = sqrt(S) V^T`` and ``B = U sqrt(S)``: factors of equal norm, rotated to no client.

    If the rank of the product is smaller than that of the factors, ``B`` is 0 in the rest, and the
    remaining rows of ``A`` come from the part of the old ``A`` outside of the product's row space: a
    direction in which both are 0 would never be trained again. The largest entry of each row of ``A`` is
    positive, so that the factors do not depend on signs that a decomposition chooses.
    """
    u, s, vt = _terms(of)
    kept, root = of.mean or of.previous, s.sqrt()
    if kept is None:
        size = root.mean() if len(root) else 1.0
        rest = of.vt[len(s) :] * size
    else:
        _, outside, directions = _around(kept[0], vt)
        rest = directions[:, len(s) :].mT @ outside
    a = torch.cat([root[:, None] * vt, rest])
    b = torch.cat([u * root, u.new_zeros(len(u), len(rest))], 1)
    signs = a.gather(1, a.abs().argmax(1, keepdim=True)).sign()
    return signs * a, signs.mT * b


def _terms(of: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """Return the terms that are not 0."""
    there = of.s > of.s[0] * torch.finfo(of.s.dtype).eps * len(of.s)
    return of.u[:, there], of.s[there], of.vt[there]


def _around(a: Tensor, vt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``A V``, the part of ``A`` outside of the row space, and its left singular vectors.

    These are ``[rank, rank]``, those of the smallest singular values first.
    """
    inside = a @ vt.mT
    outside = a - inside @ vt
    wide = outside.double()
    return inside, outside, torch.linalg.eigh(wide @ wide.mT)[1].to(a)


def rotated(factors: Factors, to: Factors) -> Factors:
    """Return ``R A`` and ``B R^T`` for the rotation that brings them nearest to others.

    ``R = polar(A_to A^T + B_to^T B)`` is the closest rotation with both factors together. One factor
    alone may find a rotation that is not there: after a short training ``B`` is nearly 0, and its
    rotation is noise.
    """
    a, b = factors
    r = polar((to[0] @ a.mT + to[1].mT @ b).double()).to(a)
    return r @ a, b @ r.mT


def near_mean(of: Wanted) -> Factors:
    """Return balanced factors, rotated to the mean of the clients', else to those that they received."""
    to = of.mean or of.previous
    return balanced(of) if to is None else rotated(balanced(of), to)


def near_previous(of: Wanted) -> Factors:
    """Return balanced factors, rotated to those that the clients received, else to their mean."""
    to = of.previous or of.mean
    return balanced(of) if to is None else rotated(balanced(of), to)


def keep_a(of: Wanted) -> Factors:
    """Return the factors whose ``A`` is as near to the clients' mean ``A`` as the product allows.

    The row space of ``A`` has to contain that of the product, of rank ``k``. The nearest ``A`` is the
    mean without the ``k`` smallest singular directions ``Z`` of its part outside of that row space:
    ``A = A_mean - Z Z^T A_mean (I - V V^T)``, and ``B = U S (Z^T A_mean V)^-1 Z^T``. Where ``k`` is the
    rank of the factors that is ``A = A_mean V V^T``. Where the clients' ranks differ, ``A`` is kept near
    to the one that they received. Where the clients' ``A`` have little in common with the product's row
    space, the inverse makes ``B`` large (``LARGEST_GROWTH``); there the factors are those of
    ``near_mean``.
    """
    kept = of.mean or of.previous
    if kept is None:
        return balanced(of)
    u, s, vt = _terms(of)
    inside, outside, directions = _around(kept[0], vt)
    dropped = directions[:, : len(s)]
    left, singular, right = torch.linalg.svd((dropped.mT @ inside).double())
    if len(s) and not singular[-1] > torch.finfo(s.dtype).eps * singular[0]:
        return near_mean(of)
    inverse = ((right.mT / singular) @ left.mT).to(u)
    found = kept[0] - dropped @ (dropped.mT @ outside), (u * s) @ inverse @ dropped.mT
    return found if _size(found) <= LARGEST_GROWTH * _size(kept) else near_mean(of)


def _size(of: Factors) -> float:
    return sum(float(torch.linalg.vector_norm(factor)) ** 2 for factor in of)


#: The gauges by name. Plug-ins add theirs.
GAUGES: dict[str, Callable[[Wanted], Factors]] = {
    "keep-a": keep_a,
    "previous": near_previous,
    "none": balanced,
}
