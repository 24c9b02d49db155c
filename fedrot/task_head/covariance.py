"""``ShrunkCovariance``: the inverse of a shrunk covariance of features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedrot.errors import UpdateError

#: Accepted rounding error of float64 sums, relative to their size; and of covariances
#: in float32.
ROUNDING, ROUNDING32 = 1e-12, 1e-3


@dataclass(frozen=True, eq=False)
class ShrunkCovariance:
    """The inverse of a covariance of features, ``S_a = (1 - a) S + a s I`` with the
    shrinkage ``a``.

    ``values`` ``[inputs]`` and ``vectors`` ``[inputs, inputs]`` are those of ``S``;
    ``size`` is the mean square norm of the features.
    """

    values: Tensor
    vectors: Tensor
    size: Tensor
    shrinkage: float

    def solve(self, rows: Tensor, spread: Tensor | None = None) -> Tensor:
        """Return ``rows S_a^-1`` ``[rows, inputs]``; raise ``UpdateError`` if features
        vary too little.

        ``spread`` is ``s``, ``[]`` or one for each row ``[rows]``; None for ``tr(S) /
        inputs``.
        """
        spread = self.values.mean() if spread is None else spread
        if not bool((spread * len(self.values) > ROUNDING * self.size).all()):
            raise UpdateError(
                "The features do not vary inside the classes, or so little beside "
                "their means that sums do not show it. Collect from more rows, or "
                "subtract a constant from the features."
            )
        shrunk = (1 - self.shrinkage) * self.values + self.shrinkage * spread.unsqueeze(
            -1
        )
        check_regular(shrunk.amin(-1) / spread)
        return (rows @ self.vectors / shrunk) @ self.vectors.mT

    def of_one(self, means: Tensor, shares: Tensor) -> Tensor:
        """Return the ridge regression of 1 on the features, ``[inputs]``, by Woodbury's
        identity.

        The covariance of all rows is ``S`` plus that of the classes' means.
        """
        mean = shares @ means
        between = shares.sqrt().unsqueeze(1) * (means - mean)
        spread = self.values.mean() + between.square().sum() / len(mean)
        rows = torch.cat([(1 - self.shrinkage) ** 0.5 * between, mean.unsqueeze(0)])
        solved = self.solve(rows, spread)
        return torch.linalg.solve(
            torch.eye(len(rows)).to(rows) + rows @ solved.mT, solved
        )[-1]


def check_regular(left: Tensor) -> None:
    """Raise ``UpdateError`` if the smallest shares of covariances are rounding
    errors.
    """
    if not bool((left > ROUNDING).all()):
        raise UpdateError(
            "The covariance of the features is singular: raise the shrinkage, or "
            "collect from more rows."
        )
