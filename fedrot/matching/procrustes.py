"""Per-head orthogonal Procrustes (Zhang et al. 2025, Eq. 8-10 and Algorithm 1), batched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedrot.matching.inside_heads import HeadSolver
from fedrot.matching.pairs import Pair
from fedrot.matching.stages import solves
from fedrot.options import AlignmentOptions
from fedrot.symmetry.actions import HeadRotation

#: Accepted ``|R^T R - I|`` (Frobenius) of an iterated rotation; one more step leaves 3/4 of its square.
RESIDUAL = 1e-4

#: Enough for condition numbers of about 1,000; worse matrices go to the SVD.
NEWTON_SCHULZ_STEPS = 24


class Procrustes(HeadSolver):
    """The rotation ``R`` of each head that maximises ``<R, M>``, ``M = sum over slots of A C^T``."""

    def similarity(self, action: HeadRotation, blocks: Sequence[Pair]) -> Tensor:
        """Return ``M`` as float64 ``[heads, dim, dim]``."""
        total: Tensor | None = None
        for pair in blocks:
            a, c = (_by_key_head(action, x) for x in pair)
            product = torch.bmm(a, c.mT)
            total = product if total is None else total.add_(product)
        if total is None:
            raise ValueError("a rotation group needs at least one slot")
        # Directions of M below its rounding error say nothing about the rotation: they do not turn.
        m = total.double()
        noise = torch.finfo(total.dtype).eps * torch.linalg.matrix_norm(m)
        return m + noise[:, None, None] * _eye(m)

    def of_cross(self, action: HeadRotation, cross: Tensor) -> Tensor:
        """Return the cross matrices themselves."""
        return cross

    def best(
        self, action: HeadRotation, evidence: Tensor, options: AlignmentOptions, precise: bool = True
    ) -> Tensor:
        """Return the best rotations, or orders of the units, ``[..., dim, dim]``."""
        if options.within_heads == "permutation":
            return best_orders(evidence)
        return polar(evidence, options.ridge, precise=precise)

    def value(self, action: HeadRotation, element: Tensor, evidence: Tensor) -> Tensor:
        """Return ``<R, M>``, ``[..., dim, dim]`` to ``[...]``."""
        return (element * evidence).sum((-1, -2))

    def still(self, action: HeadRotation, evidence: Tensor) -> Tensor:
        """Return the traces."""
        return torch.diagonal(evidence, dim1=-2, dim2=-1).sum(-1)

    def worth(self, action: HeadRotation, evidence: Tensor, options: AlignmentOptions) -> Tensor:
        """Return ``<R, M>`` of the best rotations: the sums of singular values."""
        if options.within_heads == "rotation" and options.ridge == 0:
            return torch.linalg.svdvals(evidence).sum(-1)
        return super().worth(action, evidence, options)


solves(HeadRotation)(Procrustes())


def _by_key_head(action: HeadRotation, rows: Tensor) -> Tensor:
    """Return ``[heads, dim, rest]``; query heads that share a key head lie side by side in ``rest``."""
    if len(rows) == action.heads * action.dim:
        return rows.unflatten(0, (action.heads, action.dim))
    return rows.unflatten(0, (action.heads, -1, action.dim)).transpose(1, 2).flatten(2)


def polar(m: Tensor, ridge: float = 0.0, precise: bool = True) -> Tensor:
    """Return ``argmax <R, M + ridge * sigma_1 * I>`` over orthogonal ``R``, shape ``[..., d, d]``.

    Args:
        m: matrices ``[..., d, d]``; an all-zero matrix gives the identity.
        ridge: pull towards the identity: 0 gives the plain polar factor.
        precise: True for a float64 SVD. False, for matrices that were computed in float32: Newton-Schulz
            iterations in float32 and one in float64, and an SVD for matrices that do not converge; the
            result is orthogonal to 1e-8.

    The result is float64.
    """
    if ridge > 0:
        sigma = torch.linalg.matrix_norm(m, ord=2)
        m = m + ridge * sigma[..., None, None] * _eye(m)
    if precise:
        return _polar_by_svd(m)
    r = _newton_schulz(m.float()).double()
    gram = r.mT @ r
    failed = ~(_residual(gram) <= RESIDUAL)
    r = 1.5 * r - 0.5 * r @ gram
    if failed.any():
        r[failed] = _polar_by_svd(m[failed])
    return r


def best_orders(m: Tensor) -> Tensor:
    """Return ``argmax <P, M>`` over permutation matrices ``P``, float64 ``[..., d, d]``."""
    from scipy.optimize import linear_sum_assignment

    flat = m.reshape(-1, *m.shape[-2:]).cpu().numpy()
    orders = torch.tensor(np.stack([linear_sum_assignment(s, maximize=True)[1] for s in flat]))
    return _eye(m)[orders.to(m.device)].reshape(m.shape)


def _newton_schulz(m: Tensor) -> Tensor:
    """Iterate ``X <- X (3 I - X^T X) / 2`` from ``M`` scaled to singular values of at most 1."""
    columns, rows = (torch.linalg.matrix_norm(m, ord=order) for order in (1, torch.inf))
    bound = torch.minimum((columns * rows).sqrt(), torch.linalg.matrix_norm(m))
    x = m / bound.clamp_min(torch.finfo(m.dtype).tiny)[..., None, None]
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x.mT @ x
        if bool((_residual(gram) <= RESIDUAL / 2).all()):
            break
        x = torch.baddbmm(x.flatten(0, -3), x.flatten(0, -3), gram.flatten(0, -3), beta=1.5, alpha=-0.5)
        x = x.reshape(m.shape)
    return x


def _residual(gram: Tensor) -> Tensor:
    """Return ``|X^T X - I|`` (Frobenius) per matrix, an upper bound of the spectral norm."""
    return torch.linalg.matrix_norm(gram - _eye(gram))


def _eye(like: Tensor) -> Tensor:
    """Return the identity with the size, dtype and device of square matrices."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _polar_by_svd(m: Tensor) -> Tensor:
    try:
        u, _, vh = torch.linalg.svd(m)
    except RuntimeError:
        u, vh = _robust_svd(m)
    return u @ vh


def _robust_svd(m: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``U`` and ``V^T`` by the QR iteration, which converges where divide and conquer may not."""
    import scipy.linalg

    flat = m.reshape(-1, *m.shape[-2:]).cpu().numpy()
    factors = [scipy.linalg.svd(matrix, lapack_driver="gesvd") for matrix in flat]
    u, vh = (np.stack([f[i] for f in factors]).reshape(m.shape) for i in (0, 2))
    return torch.from_numpy(u).to(m), torch.from_numpy(vh).to(m)
