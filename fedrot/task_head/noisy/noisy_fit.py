"""``fit_to_noisy_sums``: a task head from noisy sums and public features."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrot.task_head.covariance import ShrunkCovariance
from fedrot.task_head.noisy.noisy_sums import NoisySums
from fedrot.task_head.noisy.public_features import PublicFeatures
from fedrot.task_head.outputs import OUTPUT_KINDS, SINGLE

#: How much the public covariance is shrunk to its mean. This and the temperature were
#: chosen on dair_emotion and CrowdFlower; see docs/results/private.md for other data.
SHRINKAGE = 0.5

#: The divisor of the log likelihoods. Private rows are not spread as public ones are,
#: and no held-out rows choose a temperature.
TEMPERATURE = 2.0


def fit_to_noisy_sums(
    total: NoisySums, public: PublicFeatures, bias: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight and bias of a task head, and the priors in its bias.

    Linear discriminant analysis, as in ``fitted_task_heads``, with the public
    covariance inside the classes. A class's mean is drawn to that of all rows by what
    its noise is worth: along each eigenvector of the public covariance, the means are
    taken to be normal around it, with a variance that is ``t`` times the eigenvalue,
    and ``t`` is estimated from all of them (empirical Bayes). What stays unknown of the
    means is added to the covariance.

    Args:
        total: over all sites.
        public: of the same body.
        bias: whether the layer has a bias; see ``fitted_task_heads``.

    Returns:
        float64 ``[classes, inputs]``, ``[classes]`` and ``[classes]``.

    Source: for the discriminant, ``fitted_task_heads``; for the means, Efron and
    Morris, "Stein's Estimation Rule and Its Competitors" (JASA 1973).

    Example: ``weight, bias, priors = fit_to_noisy_sums(total, public)``

    Raises:
        UpdateError: there are fewer than two classes.
    """
    radius = public.clipping.radius
    values = public.values / radius**2
    spread = (1 - SHRINKAGE) * values + SHRINKAGE * values.mean()
    # A count that is not above its noise may be that of no row.
    counts = total.counts.clamp(min=max(1.0, float(total.variance.sqrt())))
    priors = counts / counts.sum()
    along = total.sums @ public.vectors
    mean = along.sum(0) / counts.sum()
    differences = along / counts.unsqueeze(1) - mean
    errors = (total.variance / counts.square()).unsqueeze(1) + spread / counts[:, None]
    signal = _signal(differences.square() / spread, errors / spread) * spread
    known = signal / (signal + errors)
    means = radius * (mean + known * differences) @ public.vectors.mT
    means = public.clipping.mean + means
    # What stays unknown of the means spreads rows around them.
    inside = TEMPERATURE * radius**2 * (spread + priors @ (known * errors))
    covariance = ShrunkCovariance(
        inside, public.vectors, torch.ones_like(inside), shrinkage=0.0
    )
    weight, offset = OUTPUT_KINDS[SINGLE].fit(
        counts, counts.unsqueeze(1) * means, covariance, None
    )
    if not bias:
        weight = weight + torch.outer(offset, covariance.ridge_of_one(means, priors))
        offset = torch.zeros_like(offset)
    return weight, offset, priors


def _signal(squares: Tensor, errors: Tensor) -> Tensor:
    """Return the variance of means, given squares that have errors as well.

    The moment estimate, in which a square counts by the precision of its error; a
    little above 0 at least.
    """
    precision = errors.square().reciprocal()
    return ((precision * (squares - errors)).sum() / precision.sum()).clamp(min=1e-6)
