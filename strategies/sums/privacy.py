"""``Privacy``: what bounds a client's part in ``SecureRegMean``'s sums, and the epsilon of the noise.

One release is the sum of all clients' contributions, each of norm ``C`` at most, plus Gaussian noise of
standard deviation ``z C`` in every entry. Replacing one client's contribution by zero changes the sum by
``C`` at most, replacing it by another's by ``2 C``. So the release is a Gaussian mechanism of noise
multiplier ``z``, or ``z / 2``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.special import log_ndtr

from fedrot.errors import FedrotError


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of whole clients for ``SecureRegMean``.

    Attributes:
        clipping_norm: ``C``, the largest norm of all that a client adds to the sums, as one vector in
            the scaled coordinates in which it is sent. A longer vector is shortened.
        noise_multiplier: ``z``; the sum gets noise of standard deviation ``z C`` in every entry, once,
            at the server.
        seed: of the noise, for tests. None draws it from the operating system: who knows the seed can
            remove the noise.

    Raises:
        FedrotError: a value is not positive and finite.
    """

    clipping_norm: float
    noise_multiplier: float
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("clipping_norm", "noise_multiplier"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise FedrotError(f"{name} is {value}; give a positive number.")

    def epsilon(self, delta: float, rounds: int = 1, *, replaced: bool = False) -> float:
        """Return the epsilon of so many rounds, see ``gaussian_epsilon``.

        Args:
            delta: above 0, below 1.
            rounds: in which a client takes part.
            replaced: neighbouring inputs differ in one client's contribution by another's, not by zero.
        """
        return gaussian_epsilon(self.noise_multiplier / (2 if replaced else 1), delta, rounds)


def gaussian_epsilon(noise_multiplier: float, delta: float, rounds: int = 1) -> float:
    """Return the smallest epsilon for which Gaussian noise is (epsilon, delta) differentially private.

    With ``mu = sqrt(rounds) / z`` it solves ``Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)
    = delta`` (Balle and Wang 2018, *Improving the Gaussian Mechanism for Differential Privacy*, Theorem
    8), which is exact. Rounds of full participation compose by ``mu^2 = sum 1/z^2``, exactly, also if
    later rounds depend on earlier ones (Dong, Roth and Su 2022, *Gaussian Differential Privacy*,
    Corollary 3.3).

    Args:
        noise_multiplier: ``z``, standard deviation of the noise by sensitivity.
        delta: above 0, below 1.
        rounds: releases, each with this noise.

    Example: ``gaussian_epsilon(1.0, 1e-5, rounds=10)``

    Raises:
        FedrotError: an argument is out of range.
    """
    if not 0 < noise_multiplier < math.inf or not 0 < delta < 1 or rounds < 1:
        raise FedrotError(
            f"noise_multiplier is {noise_multiplier}, delta {delta}, rounds {rounds}; give a positive "
            "multiplier, a delta above 0 and below 1, and at least 1 round."
        )
    mu = math.sqrt(rounds) / noise_multiplier

    def excess(epsilon: float) -> float:
        """Return the logarithm of the delta at an epsilon, less that of the given delta."""
        first = float(log_ndtr(mu / 2 - epsilon / mu))
        second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
        # Equal to rounding far out in the tails, where the delta is 0 to rounding.
        left = -math.expm1(min(second - first, 0.0))
        return first + (math.log(left) if left > 0 else -math.inf) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    largest = 1.0
    while excess(largest) > 0:
        largest *= 2
    # brentq needs finite ends; -inf lies below the root all the same.
    return float(
        brentq(lambda epsilon: max(excess(epsilon), -1e3), 0.0, largest, xtol=1e-12, rtol=1e-12)
    )
