"""``Spectrum``: the inverse of a covariance at every shrinkage, from one eigendecomposition."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrot.errors import UpdateError

#: Accepted rounding error of float64 sums, relative to their size.
ROUNDING = 1e-12


class Spectrum:
    """Eigenvalues and eigenvectors of a covariance ``S`` of features.

    Args:
        covariance: float64 ``[inputs, inputs]``.
        size: mean square norm of the features, float64 ``[]``.
    """

    def __init__(self, covariance: Tensor, size: Tensor) -> None:
        self.trace, self._size = covariance.trace(), size
        self._values, self._vectors = torch.linalg.eigh(covariance)

    def solve(self, rows: Tensor, shrinkage: float, spread: Tensor | None = None) -> Tensor:
        """Return ``rows S_a^-1``, where ``S_a`` is ``(1 - a) S + a s I`` and ``a`` the shrinkage.

        Args:
            rows: float64 ``[rows, inputs]``.
            shrinkage: from 0 to 1.
            spread: ``s``, one for all rows ``[]`` or for each ``[rows]``; ``tr(S) / inputs`` if None.

        Raises:
            UpdateError: features do not vary, or ``S_a`` is singular.
        """
        inputs = len(self._values)
        spread = self.trace / inputs if spread is None else spread
        if not bool((spread * inputs > ROUNDING * self._size).all()):
            raise UpdateError(
                "The features do not vary inside the classes, or so little beside their means that "
                "float64 sums do not show it. Collect from more rows, or subtract a constant from the "
                "features."
            )
        shrunk = (1 - shrinkage) * self._values + shrinkage * spread.unsqueeze(-1)
        check_positive(shrunk.amin(-1) / spread)
        return (rows @ self._vectors / shrunk) @ self._vectors.mT


def check_positive(shares: Tensor) -> None:
    """Raise ``UpdateError`` unless what a covariance keeps of its size is above rounding errors."""
    if not bool((shares > ROUNDING).all()):
        raise UpdateError(
            "The covariance of the features is singular: raise the shrinkage, or collect from more rows."
        )
