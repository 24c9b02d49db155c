"""The ledger: how much noise an epsilon needs, and when it is spent."""

import math

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedrot.errors import FedrotError
from fedrot.strategies import Privacy
from fedrot.strategies.client.ledger import BudgetSpent, release_of


def delta_of(multiplier, epsilon):
    """Return the delta of Gaussian noise (Balle and Wang 2018, theorem 8)."""
    mu = 1 / multiplier
    left, right = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    return norm.cdf(left) - math.exp(epsilon) * norm.cdf(right)


def privacy_of(epsilon, delta=1e-5, releases=1):
    return Privacy(record="/r.jsonl", epsilon=epsilon, delta=delta, releases=releases)


@pytest.mark.parametrize("releases", [1, 3])
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (3.0, 1e-6), (8.0, 1e-5)])
def test_the_noise_of_all_releases_has_the_epsilon(epsilon, delta, releases):
    privacy = privacy_of(epsilon, delta, releases)
    alone = brentq(lambda m: delta_of(m, epsilon) - delta, 0.1, 100)
    lines = [{"stage": "count"}]
    for _ in range(releases):
        lines.append(release_of(privacy, lines))
        # Gaussian noises compose as one whose inverse squares add up.
        assert lines[-1]["multiplier"] == pytest.approx(alone * releases**0.5, rel=1e-4)
    assert lines[-1]["epsilon"] == pytest.approx(epsilon, rel=1e-3)
    with pytest.raises(BudgetSpent, match="spent"):
        release_of(privacy, lines)


def test_what_was_told_under_other_settings_counts():
    spent = release_of(privacy_of(3.0), [])
    for epsilon in (1.0, 3.0):
        with pytest.raises(BudgetSpent):
            release_of(privacy_of(epsilon), [spent])
    # Noise of a larger budget, beside what was told.
    assert release_of(privacy_of(8.0, releases=2), [spent])["epsilon"] < 8
    assert release_of(privacy_of(3.0), [])["epsilon"] == pytest.approx(3, rel=1e-6)


@pytest.mark.parametrize("noise", [0, -1.0, math.inf, math.nan, "1.4", None])
def test_a_line_that_cannot_be_counted_is_an_error(noise):
    with pytest.raises(FedrotError, match="multiplier"):
        release_of(privacy_of(3.0), [{"multiplier": noise}])


@pytest.mark.parametrize(
    "settings",
    [
        {"epsilon": 0.0},
        {"epsilon": -1.0},
        {"epsilon": math.inf},
        {"epsilon": math.nan},
        {"delta": 0.0},
        {"delta": 1.0},
        {"releases": 0},
        {"releases": 1.5},
    ],
)
def test_budgets_that_are_none_are_refused(settings):
    (name,) = settings
    with pytest.raises(FedrotError, match=name):
        Privacy(**{"record": "/r.jsonl", "epsilon": 3.0, **settings})


@pytest.mark.parametrize("record", [None, "r.jsonl"])
def test_a_budget_needs_a_ledger_in_one_place(record):
    with pytest.raises(FedrotError, match="record"):
        Privacy(epsilon=3.0, record=record)
