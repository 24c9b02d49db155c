"""``polar``: batched orthogonal Procrustes.

Source: Zhang et al. 2025, Eq. 8-10 and Algorithm 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedrot.errors import UpdateError
from fedrot.matching.assignment import best_columns
from fedrot.tensors import identity

#: Accepted ``|R^T R - I|`` (Frobenius) of an iterated rotation; one more step leaves
#: 3/4 of its square.
RESIDUAL = 1e-4

#: Enough for condition numbers of about 1,000; other matrices need the SVD.
NEWTON_SCHULZ_STEPS = 24


def polar(
    m: Tensor,
    precise: bool = True,
) -> Tensor:
    """Return the polar factor ``argmax <R, M>`` over orthogonal ``R``.

    Args:
        m: matrices ``[..., d, d]``; an all-zero matrix gives the identity.
        precise: True for a float64 SVD. False, for matrices computed in float32:
            Newton-Schulz steps in float32 and one step in float64, with an SVD for
            matrices that do not converge; the result is orthogonal to 1e-8.

    The result is float64 ``[..., d, d]``.
    """
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
    """Return ``argmax <P, M>`` over permutation matrices, float64 ``[..., d, d]``."""
    scores = _batch(m).cpu()
    orders = torch.stack([best_columns(score) for score in scores])
    return identity(m)[orders.to(m.device)].reshape(m.shape)


def _newton_schulz(m: Tensor) -> Tensor:
    """Iterate ``X <- X (3 I - X^T X) / 2`` from the scaled ``M``."""
    columns = torch.linalg.matrix_norm(m, ord=1)
    rows = torch.linalg.matrix_norm(m, ord=torch.inf)
    # Both are upper bounds of the spectral norm; the iteration needs singular values of
    # at most 1.
    bound = torch.minimum((columns * rows).sqrt(), torch.linalg.matrix_norm(m))
    bound = bound.clamp_min(torch.finfo(m.dtype).tiny)
    x = m / bound[..., None, None]
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x.mT @ x
        if (_residual(gram) <= RESIDUAL / 2).all():
            break
        batch = _batch(x)
        x = torch.baddbmm(
            batch,
            batch,
            _batch(gram),
            beta=1.5,
            alpha=-0.5,
        ).reshape(m.shape)
    return x


def _residual(gram: Tensor) -> Tensor:
    """Return ``|X^T X - I|`` (Frobenius) per matrix; the spectral norm is no larger."""
    return torch.linalg.matrix_norm(gram - identity(gram))


def _batch(m: Tensor) -> Tensor:
    """Return matrices ``[..., d, d]`` as one batch ``[n, d, d]``."""
    return m.reshape(-1, *m.shape[-2:])


def singular_values(m: Tensor) -> Tensor:
    """Return the singular values of matrices ``[..., d, d]``, ``[..., d]``."""
    return torch.linalg.svdvals(_finite(m))


def _finite(m: Tensor) -> Tensor:
    """Return the matrices if they are finite."""
    # With others, LAPACK prints errors or never ends.
    if not torch.isfinite(m).all():
        raise UpdateError(
            "The similarity of the two models overflows. Check the client's training."
        )
    return m


def _polar_by_svd(m: Tensor) -> Tensor:
    _finite(m)
    try:
        u, _, vh = torch.linalg.svd(m)
    except RuntimeError:
        import scipy.linalg

        # Divide and conquer does not converge: take the QR iteration.
        factors = []
        for matrix in _batch(m).cpu().numpy():
            factors.append(scipy.linalg.svd(matrix, lapack_driver="gesvd"))
        lefts, _, rights = zip(*factors, strict=True)
        stacks = (torch.from_numpy(np.stack(side)) for side in (lefts, rights))
        u, vh = (stack.view(m.shape).to(m) for stack in stacks)
    return u @ vh
