"""``ShrunkCovariance``: the inverse of a shrunk covariance of features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.errors import UpdateError

#: Accepted rounding error of float64 sums, relative to their size.
ROUNDING = 1e-12

#: Accepted rounding error of covariances in float32.
ROUNDING32 = 1e-3


@dataclass(frozen=True, eq=False)
class ShrunkCovariance:
    """A covariance ``S`` of features, shrunk to ``S_a = (1 - a) S + a s I``.

    Attributes:
        values: eigenvalues of ``S``, float64 ``[inputs]``.
        vectors: eigenvectors of ``S``, ``[inputs, inputs]``.
        size: the mean square norm of the features.
        shrinkage: ``a``.
    """

    values: Tensor
    vectors: Tensor
    size: Tensor
    shrinkage: float

    def solve(self, rows: Tensor, spread: Tensor | None = None) -> Tensor:
        """Return ``rows S_a^-1`` ``[rows, inputs]``.

        Args:
            spread: ``s``, ``[]`` or one for each row ``[rows]``; None for
                ``tr(S) / inputs``.

        Raises:
            UpdateError: the features vary too little, or ``S_a`` is singular.
        """
        if spread is None:
            spread = self.values.mean()
        if not bool((spread * len(self.values) > ROUNDING * self.size).all()):
            raise UpdateError(
                "The features do not vary inside the classes, or so little beside "
                "their means that sums do not show it. Collect from more rows, or "
                "subtract a constant from the features."
            )
        identity = self.shrinkage * spread.unsqueeze(-1)
        shrunk = (1 - self.shrinkage) * self.values + identity
        check_regular(shrunk.amin(-1) / spread)
        return (rows @ self.vectors / shrunk) @ self.vectors.mT

    def ridge_of_one(self, means: Tensor, priors: Tensor) -> Tensor:
        """Return the ridge regression of 1 on the features, ``[inputs]``.

        The covariance of all rows is ``S`` plus that of the classes' means, of low
        rank: its inverse follows by Woodbury's identity.

        Args:
            means: of the classes, ``[classes, inputs]``.
            priors: shares of the classes, ``[classes]``.
        """
        mean = priors @ means
        between = priors.sqrt().unsqueeze(1) * (means - mean)
        spread = self.values.mean() + between.square().sum() / len(mean)
        scaled = (1 - self.shrinkage) ** 0.5 * between
        rows = torch.cat([scaled, mean.unsqueeze(0)])
        solved = self.solve(rows, spread)
        system = torch.eye(len(rows)).to(rows) + rows @ solved.mT
        return torch.linalg.solve(system, solved)[-1]


def check_regular(shares: Tensor) -> None:
    """Raise ``UpdateError`` if shares of covariances are rounding errors."""
    if not bool((shares > ROUNDING).all()):
        raise UpdateError(
            "The covariance of the features is singular: raise the shrinkage, or "
            "collect from more rows."
        )
