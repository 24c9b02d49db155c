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

_ONE = torch.ones((), dtype=torch.float64)


def class_means(counts: Tensor, sums: Tensor) -> Tensor:
    """Return the means of classes, 0 for classes without rows."""
    return sums / torch.where(counts > 0, counts, 1.0).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class ShrunkCovariance:
    """A covariance ``S`` of features, shrunk to ``S_a = (1 - a) S + a t D``.

    ``D`` is diagonal. The eigendecomposition is that of ``S`` in units of ``D``, so
    that the units of features do not matter.

    Attributes:
        values: eigenvalues of ``D^-1/2 S D^-1/2``, float64 ``[inputs]``.
        vectors: its eigenvectors, ``[inputs, inputs]``.
        deviations: the root of ``D``, from ``ClassSums.deviations``, ``[inputs]``.
        shrinkage: ``a``.
    """

    values: Tensor
    vectors: Tensor
    deviations: Tensor
    shrinkage: float

    def solve(self, rows: Tensor, spread: Tensor = _ONE) -> Tensor:
        """Return ``rows S_a^-1`` ``[rows, inputs]``.

        Args:
            spread: ``t``, ``[]`` or one for each row ``[rows]``.

        Raises:
            UpdateError: ``S_a`` is singular.
        """
        identity = self.shrinkage * spread.unsqueeze(-1)
        # Rounding, or a client that lies, leaves negative eigenvalues.
        shrunk = (1 - self.shrinkage) * self.values.clamp(min=0) + identity
        check_regular(shrunk.amin(-1) / spread)
        turned = self.scaled(rows) @ self.vectors
        return self.scaled((turned / shrunk) @ self.vectors.mT)

    def scaled(self, rows: Tensor) -> Tensor:
        """Return rows ``[rows, inputs]`` in units of the deviations."""
        return rows / self.deviations

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
        spread = 1 + self.scaled(between).square().sum() / len(mean)
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
