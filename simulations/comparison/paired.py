"""``paired_difference``: whether differences over seeds are more than noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

LOWER_IS_BETTER = frozenset(
    {"loss", "calibrated_loss", "ece", "perplexity", "pseudo_perplexity"}
)
#: Largest difference of metrics between models that differ only by the order of float32
#: sums.
ROUNDING = 1e-6


@dataclass(frozen=True)
class Paired:
    """Our values minus those of another strategy over ``n`` seeds: mean and verdict.

    ``smallest`` is half of the two-sided 95 % t interval: the smallest mean difference
    that is outside noise at this spread. The verdict is "better" or "worse", "within
    noise" if the interval contains 0, "same" if no difference is above ``ROUNDING``,
    "not finite", or "no interval" (``smallest`` is NaN) with fewer than two seeds or
    without a spread.
    """

    mean: float
    smallest: float
    n: int
    verdict: str


def paired_difference(
    differences: Sequence[float],
    *,
    lower_is_better: bool = False,
) -> Paired:
    """Return the mean of differences, t(0.975, n - 1) sd / sqrt(n), and the verdict."""
    from scipy import stats

    n = len(differences)
    if not np.isfinite(differences).all():
        return Paired(nan, nan, n, "not finite")
    mean = float(np.mean(differences)) if n else nan
    error = float(stats.sem(differences)) if n > 1 else 0.0
    half = nan
    verdict = "better" if (mean < 0) == lower_is_better else "worse"
    if n and max(map(abs, differences)) <= ROUNDING:
        verdict = "same"
    elif not error > ROUNDING * abs(mean):
        verdict = "no interval"
    else:
        half = float(stats.t.ppf(0.975, n - 1)) * error
        if abs(mean) <= half:
            verdict = "within noise"
    return Paired(mean, half, n, verdict)
