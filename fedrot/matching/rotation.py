"""Per-head orthogonal Procrustes (Zhang et al. 2025, Eq. 8-10 and Algorithm 1), batched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from fedrot.matching.blocks import Pair
from fedrot.symmetry.kinds import HeadRotation

#: A rotation must gain more than this share of ``|trace|``: what is below is rounding.
MINIMUM_GAIN = 1e-12


def similarity(kind: HeadRotation, blocks: Sequence[Pair]) -> Tensor:
    """Return ``M_h = sum over slots of A_h C_h^T`` as float64 ``[heads, dim, dim]``."""
    total = None
    for a, c in blocks:
        shape = (kind.heads, kind.dim)
        m = torch.bmm(a.unflatten(0, shape), c.unflatten(0, shape).mT)
        total = m if total is None else total.add_(m)
    if total is None:
        raise ValueError("a rotation group needs at least one slot")
    # The size of rounding in M: directions below it carry no information about the rotation.
    noise = torch.finfo(total.dtype).eps * torch.linalg.matrix_norm(total.double())
    return total.double() + noise[:, None, None] * torch.eye(kind.dim, dtype=torch.float64).to(
        total.device
    )


def polar(m: Tensor, ridge: float = 0.0) -> Tensor:
    """Return ``argmax <R, M + ridge * sigma_1 * I>`` over orthogonal ``R``, shape ``[..., d, d]``.

    ``ridge`` pulls towards the identity: 0 is the plain polar factor, large values do not move. An
    all-zero matrix gives the identity.
    """
    if ridge > 0:
        sigma = torch.linalg.matrix_norm(m, ord=2)
        m = m + ridge * sigma[..., None, None] * torch.eye(m.shape[-1]).to(m)
    try:
        u, _, vh = torch.linalg.svd(m)
    except RuntimeError:
        u, vh = _robust_svd(m)
    return u @ vh


def _robust_svd(m: Tensor) -> tuple[Tensor, Tensor]:
    """Divide-and-conquer SVD can fail to converge where the QR iteration does not."""
    flat = m.reshape(-1, *m.shape[-2:]).cpu().numpy()
    factors = [scipy.linalg.svd(matrix, lapack_driver="gesvd") for matrix in flat]
    u, vh = (np.stack([f[i] for f in factors]).reshape(m.shape) for i in (0, 2))
    return torch.from_numpy(u).to(m), torch.from_numpy(vh).to(m)


def gain(rotation: Tensor, m: Tensor) -> list[float | None]:
    """Return by how much the rotations lower the squared distance, ``2 (<R, M> - tr M)``, per group.

    ``rotation`` and ``m`` are ``[groups, heads, d, d]``. None where the gain is rounding: a rotation
    by such an angle is noise, not alignment.
    """
    trace = torch.diagonal(m, dim1=-2, dim2=-1).sum((-2, -1))
    improvement = (rotation * m).sum((-3, -2, -1)) - trace
    worth = improvement > MINIMUM_GAIN * trace.abs()
    return [2 * g if ok else None for g, ok in zip(improvement.tolist(), worth, strict=True)]


def mean_angle(rotation: Tensor) -> float:
    """Return ``arccos(tr R / d)`` in degrees, averaged over the heads."""
    cosine = torch.diagonal(rotation, dim1=-2, dim2=-1).mean(-1).clamp(-1, 1)
    return float(torch.rad2deg(torch.arccos(cosine)).mean())
