"""``AdapterReport``: the errors of an average of adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

#: A report mentions the share that a sum lost if it is larger than this.
SHOWN = 0.001


@dataclass(frozen=True)
class AdapterReport:
    """The errors of an average of adapters; ``print(report)`` shows them.

    Attributes:
        updates: number of adapters.
        error_of_factors: by module, ``|D - s B A| / |D|``, where ``D`` is the weighted
            mean of the clients' products, and ``A`` and ``B`` are the means of their
            factors. None if ranks differ.
        error: by module, the same for the factors of the result.
        lost: by module, upper bound of the relative error in ``D`` itself, a sum of
            bounded rank (``module_sums.KEPT_RANKS``). Both errors include an estimate
            of it, in which the terms that were left out are orthogonal to all others.
        magnitudes: whether the adapters have DoRA's magnitudes ``m``. The weights are
            then ``m (W + s B A) / |W + s B A|`` with the base's ``W``, but the errors
            are of products only.
    """

    updates: int
    error_of_factors: Mapping[str, float | None]
    error: Mapping[str, float]
    lost: Mapping[str, float]
    magnitudes: bool = False

    @property
    def mean_error(self) -> float:
        """The mean of ``error`` over the modules."""
        return fmean(self.error.values())

    @property
    def mean_lost(self) -> float:
        """The mean of ``lost`` over the modules."""
        return fmean(self.lost.values())

    @property
    def mean_error_of_factors(self) -> float | None:
        """The mean of ``error_of_factors`` over the modules in which it is known."""
        known = [error for error in self.error_of_factors.values() if error is not None]
        return fmean(known) if known else None

    def __str__(self) -> str:
        differ = sum(error is None for error in self.error_of_factors.values())
        naive = self.mean_error_of_factors
        noun = "adapter" if self.updates == 1 else "adapters"
        sentence = (
            f"{self.updates} {noun}: this average is {100 * self.mean_error:.1f} % "
            "from the mean of their products"
        )
        if naive is not None:
            sentence += f", the mean of the factors {100 * naive:.1f} %"
        if differ:
            sentence += (
                f"; factors of {differ} modules have no mean: their ranks differ"
            )
        if self.mean_lost > SHOWN:
            sentence += (
                "; these are estimates: the sum of bounded rank leaves out at "
                f"most {100 * self.mean_lost:.1f} %"
            )
        if self.magnitudes:
            sentence += (
                "; these are errors of products only: DoRA's magnitudes were averaged "
                "separately, so the weights may be far from the mean of the adapters' "
                "weights"
            )
        return sentence
