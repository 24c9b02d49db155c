"""A site's head, against Bayes' rule on drawn Gaussians, and where counts are few."""

from math import log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from torch.testing import assert_close

from fedrot.errors import FedrotError
from fedrot.task_head.fit import fitted_task_head
from fedrot.task_head.outputs import OUTPUT_KINDS, REGRESSION, SEVERAL, SINGLE
from fedrot.task_head.site_head import collect_counts, site_head, site_shift
from fedrot.task_head.sums import ClassSums
from tests.fedrot.collect.tiny import batch_of, tiny_classifier

WIDTH, CLASSES = 4, 3


def float64(values):
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def gaussians(seed):
    """Return means of classes, a covariance, shares of classes, rows, and a head.

    The head is the discriminant of the Gaussians, from exact moments.
    """
    random = np.random.default_rng(seed)
    means = random.normal(size=(CLASSES, WIDTH))
    mixing = random.normal(size=(WIDTH, WIDTH))
    covariance = mixing @ mixing.T + np.eye(WIDTH)
    priors = random.dirichlet(np.ones(CLASSES)) * 0.9 + 0.1 / CLASSES
    counts = 1000 * priors
    second = covariance + np.einsum("c,ci,cj->ij", priors, means, means)
    sums = ClassSums(
        float64(counts), float64(counts[:, None] * means), float64(1000 * second)
    )
    rows = random.normal(size=(20, WIDTH))
    return means, covariance, priors, rows, fitted_task_head(sums, 0.0)


def posterior(rows, means, covariance, shares):
    """Return Bayes' rule, the logarithm of each class's probability."""
    densities = [multivariate_normal(m, covariance).logpdf(rows) for m in means]
    joint = np.stack(densities, 1) + np.log(shares)
    return joint - logsumexp(joint, axis=1, keepdims=True)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 999),
    st.lists(st.integers(0, 50), min_size=3, max_size=3),
    st.sampled_from([0.5, 1.0, 4.0]),
)
def test_a_site_head_is_bayes_rule_with_the_shares_of_the_site(seed, counts, strength):
    means, covariance, priors, rows, head = gaussians(seed)
    shares = (np.array(counts) + strength * priors) / (sum(counts) + strength)
    weight, bias = site_head(head, float64(priors), float64(counts), strength=strength)
    logits = float64(rows) @ weight.mT + bias
    expected = posterior(rows, means, covariance, shares)
    assert_close(logits.log_softmax(1).numpy(), expected, atol=1e-7, rtol=1e-7)


def test_each_label_is_bayes_rule_between_rows_with_and_without_it():
    priors = np.array([0.3, 0.05])
    counts = np.array([40.0, 10, 0])
    odds = [0.7, -1.2]
    for place, (prior, rows) in enumerate(zip(priors, counts[1:], strict=True)):
        share = (rows + prior) / 41
        ratio = np.exp(odds[place]) * (share / prior) / ((1 - share) / (1 - prior))
        shift = site_shift(float64(priors), float64(counts), SEVERAL)
        assert_close(odds[place] + float(shift[place]), log(ratio))


def test_a_regression_adds_the_mean_residual_of_a_site_shrunk():
    shift = site_shift(torch.zeros(0), float64([4, 8, -2]), REGRESSION)
    assert_close(shift, float64([8 / 5, -2 / 5]))


@pytest.mark.parametrize(
    ("problem", "priors", "counts", "expected"),
    [
        (SINGLE, [0.2, 0.8], [0, 0], [0, 0]),
        (SINGLE, [0.5, 0.5], [9, 0], [log(1.9), log(0.1)]),
        # A prior of 0 counts as the smallest that is not 0.
        (SINGLE, [0.8, 0.2, 0], [0, 0, 4], [log(0.2), log(0.2), log(4.2)]),
        (SEVERAL, [0.2, 0.8], [0, 0, 0], [0, 0]),
        (SEVERAL, [0.5], [9, 9], [log(19)]),
        (SEVERAL, [0.0], [0, 0], [0]),
        (REGRESSION, [], [0, 0], [0]),
    ],
)
def test_values_where_counts_or_priors_are_zero(problem, priors, counts, expected):
    shift = site_shift(float64(priors), float64(counts), problem)
    assert_close(shift, float64(expected))


@pytest.mark.parametrize(
    ("problem", "priors", "counts", "strength", "said"),
    [
        (SINGLE, [0.5, 0.5], [1, 2, 3], 1, "3 counts"),
        (SINGLE, [0.5, 1.5], [1, 2], 1, "1.5"),
        (SINGLE, [0.0, 0.0], [1, 2], 1, "0.0"),
        (SINGLE, [0.5, float("nan")], [1, 2], 1, "nan"),
        (SINGLE, [0.5, 0.5], [1, -2], 1, "-2"),
        (SINGLE, [0.5, 0.5], [1, float("inf")], 1, "inf"),
        (SINGLE, [0.5, 0.5], [1, 2], 0, "strength"),
        (SINGLE, [[0.5, 0.5]], [1, 2], 1, r"\[1, 2\]"),
        (SEVERAL, [0.5, 0.5], [1, 2], 1, "2 counts"),
        (SEVERAL, [0.5], [1, 2], 1, "more rows"),
        ("ordinal", [0.5], [1, 2], 1, "ordinal"),
    ],
)
def test_what_cannot_be_shifted(problem, priors, counts, strength, said):
    with pytest.raises(FedrotError, match=said):
        site_shift(float64(priors), float64(counts), problem, strength)


@pytest.mark.parametrize(
    ("problem", "counts", "priors"),
    [
        (SINGLE, [6, 0, 2], [6 / 8, 1 / 16, 2 / 8]),
        (SEVERAL, [8, 2, 0, 8], [2 / 8, 1 / 18, 17 / 18]),
        (REGRESSION, [8, 2, 3], []),
    ],
)
def test_priors_are_the_shares_in_a_fitted_bias(problem, counts, priors):
    assert_close(OUTPUT_KINDS[problem].priors(float64(counts)), float64(priors))


@pytest.mark.parametrize("problem", [*OUTPUT_KINDS])
def test_counts_of_a_site_are_those_of_its_labels(problem):
    model = tiny_classifier("bert", num_labels=3, problem_type=problem)
    random = torch.Generator().manual_seed(1)
    batches = [batch_of(seed, rows=4) for seed in (1, 2)]
    for batch in batches:
        drawn = torch.rand(4, 3, generator=random)
        batch["labels"] = {
            SINGLE: torch.tensor([0, 2, -100, 2]),
            SEVERAL: (drawn > 0.5).float(),
            REGRESSION: drawn,
        }[problem]
    counts = collect_counts(model, iter(batches))
    if problem == SINGLE:
        expected = [2, 0, 4]
    elif problem == SEVERAL:
        labels = torch.cat([batch["labels"] for batch in batches])
        expected = [8, *labels.sum(0).tolist()]
    else:
        with torch.no_grad():
            parts = [b["labels"] - model.eval()(**b).logits for b in batches]
        expected = [8, *torch.cat(parts).double().sum(0).tolist()]
    assert_close(counts, float64(expected), atol=1e-5, rtol=1e-5)
    assert not collect_counts(model, []).any()


def test_counts_need_labels_of_the_problem():
    model = tiny_classifier("bert", num_labels=3, problem_type=SINGLE)
    batch = batch_of(1, rows=4)
    with pytest.raises(FedrotError, match="labels"):
        collect_counts(model, [batch])
    with pytest.raises(FedrotError, match="num_labels"):
        collect_counts(model, [{**batch, "labels": torch.tensor([0, 3, 1, 1])}])
