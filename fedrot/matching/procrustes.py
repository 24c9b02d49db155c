"""Per-head orthogonal Procrustes (Zhang et al. 2025, Eq. 8-10 and Algorithm 1), batched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedrot.matching.pairs import Pair
from fedrot.options import AlignmentOptions
from fedrot.symmetry.actions import HeadRotation

#: Accepted ``|R^T R - I|`` (Frobenius) of an iterated rotation; polishing leaves 3/4 of its square.
RESIDUAL = 1e-4

#: Enough for condition numbers of about 1,000; worse matrices go to the SVD.
NEWTON_SCHULZ_STEPS = 24


def similarity(kind: HeadRotation, blocks: Sequence[Pair]) -> Tensor:
    """Return ``M_h = sum over slots of A_h C_h^T`` as float64 ``[heads, dim, dim]``."""
    total: Tensor | None = None
    for pair in blocks:
        a, c = (_by_key_head(kind, x) for x in pair)
        m = torch.bmm(a, c.mT)
        total = m if total is None else total.add_(m)
    if total is None:
        raise ValueError("a rotation group needs at least one slot")
    # The size of rounding in M: directions below it carry no information about the rotation.
    noise = torch.finfo(total.dtype).eps * torch.linalg.matrix_norm(total.double())
    return total.double() + noise[:, None, None] * torch.eye(
        kind.dim, dtype=torch.float64, device=total.device
    )


def _by_key_head(kind: HeadRotation, rows: Tensor) -> Tensor:
    """Return ``[heads, dim, rest]``: heads that share a rotation lie side by side in ``rest``."""
    if len(rows) == kind.heads * kind.dim:
        return rows.unflatten(0, (kind.heads, kind.dim))
    return rows.unflatten(0, (kind.heads, -1, kind.dim)).transpose(1, 2).flatten(2)


def of_cross(kind: HeadRotation, cross: Tensor) -> Tensor:
    """Return what a rotation is found from, of cross matrices ``A C^T``: themselves."""
    return cross


def best(kind: HeadRotation, m: Tensor, options: AlignmentOptions, precise: bool = True) -> Tensor:
    """Return the best rotations, or orders, ``[..., dim, dim]``."""
    if options.within_heads == "permutation":
        return best_orders(m)
    return polar(m, options.ridge, precise=precise)


def value(kind: HeadRotation, rotation: Tensor, m: Tensor) -> Tensor:
    """Return ``<R, M>`` of rotations, ``[..., dim, dim]`` to ``[...]``."""
    return (rotation * m).sum((-1, -2))


def still(kind: HeadRotation, m: Tensor) -> Tensor:
    """Return ``<I, M>``, of the identity."""
    return torch.diagonal(m, dim1=-2, dim2=-1).sum(-1)


def polar(m: Tensor, ridge: float = 0.0, precise: bool = True) -> Tensor:
    """Return ``argmax <R, M + ridge * sigma_1 * I>`` over orthogonal ``R``, shape ``[..., d, d]``.

    ``ridge`` pulls towards the identity: 0 is the plain polar factor, large values do not move. An
    all-zero matrix gives the identity. The result is float64 and orthogonal to its rounding.

    ``precise=False`` is for matrices that were computed in float32: Newton-Schulz iterations in
    float32, polished in float64, with a float64 SVD for every matrix that does not converge; the
    result is orthogonal to 1e-8.
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
    """Return ``|X^T X - I|`` (Frobenius) per matrix: the spectral norm is at most that."""
    return torch.linalg.matrix_norm(gram - _eye(gram))


def _eye(like: Tensor) -> Tensor:
    """Return the identity in the size, dtype and place of square matrices."""
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _polar_by_svd(m: Tensor) -> Tensor:
    try:
        u, _, vh = torch.linalg.svd(m)
    except RuntimeError:
        u, vh = _robust_svd(m)
    return u @ vh


def _robust_svd(m: Tensor) -> tuple[Tensor, Tensor]:
    """Divide-and-conquer SVD can fail to converge where the QR iteration does not."""
    import scipy.linalg

    flat = m.reshape(-1, *m.shape[-2:]).cpu().numpy()
    factors = [scipy.linalg.svd(matrix, lapack_driver="gesvd") for matrix in flat]
    u, vh = (np.stack([f[i] for f in factors]).reshape(m.shape) for i in (0, 2))
    return torch.from_numpy(u).to(m), torch.from_numpy(vh).to(m)


def worth(kind: HeadRotation, m: Tensor, options: AlignmentOptions) -> Tensor:
    """Return ``<R, M>`` of the best rotation, ``[..., dim, dim]`` to ``[...]``."""
    if options.within_heads == "rotation" and options.ridge == 0:
        return torch.linalg.svdvals(m).sum(-1)
    return value(kind, best(kind, m, options), m)
