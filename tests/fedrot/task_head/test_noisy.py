"""Noisy sums: what one row changes, the noise, and the head that is fitted to them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest
from torch import nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.task_head.noisy.noisy_fit import (
    SHRINKAGE,
    TEMPERATURE,
    fit_to_noisy_sums,
)
from fedrot.task_head.noisy.noisy_sums import NoisySums, noisy_sums, system_noise
from fedrot.task_head.noisy.public_features import (
    Clipping,
    PublicFeatures,
    public_features,
)
from tests.fedrot.oracles import gap, normal, seeded

WIDTH, CLASSES = 5, 3


class Identity(nn.Module):
    """A classifier whose features are its inputs."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(WIDTH, CLASSES).double()

    def forward(self, features, labels=None):
        return type("Output", (), {"logits": self.classifier(features)})()


def numbers(*shape, seed=0):
    return normal(seeded(seed), *shape)


def sums_of(features, labels, clipping, multiplier=0.0, draw=None):
    batches = [
        {"features": features[part], "labels": labels[part]}
        for part in torch.arange(len(labels)).split(4)
    ]
    return noisy_sums(Identity(), batches, "classifier", clipping, multiplier, draw)


def clipping_of(mean=0.0, radius=1.0):
    return Clipping(
        torch.full((WIDTH,), mean, dtype=torch.float64),
        torch.tensor(radius, dtype=torch.float64),
    )


def vector_of(sums):
    return torch.cat([sums.counts, sums.sums.flatten()])


ROWS = numbers(9, WIDTH), torch.arange(9) % CLASSES
USUAL = sums_of(*ROWS, clipping_of(), 2.0)


def test_sums_without_noise_are_those_of_rows_clipped_one_by_one():
    features, labels = 2 * numbers(11, WIDTH), torch.arange(11) % 4 - 1
    features[3] = torch.inf
    clipping = clipping_of(0.5, 3.0)
    counts, sums = np.zeros(CLASSES), np.zeros((CLASSES, WIDTH))
    for row, label in zip(features.numpy(), labels.tolist(), strict=True):
        if label >= 0:
            counts[label] += 1
            row = (row - 0.5) / 3 if np.isfinite(row).all() else np.zeros(WIDTH)
            sums[label] += row / max(1, np.linalg.norm(row))
    noisy = sums_of(features, labels, clipping)
    assert noisy.counts.numpy() == pytest.approx(counts)
    assert noisy.sums.numpy() == pytest.approx(sums)
    assert float(noisy.variance) == 0


@pytest.mark.parametrize("rows", [0, 3])
def test_the_answer_has_one_form_whatever_the_rows_are(rows):
    noisy = sums_of(numbers(rows, WIDTH), torch.arange(rows), clipping_of(), 2.0)
    assert noisy.sums.shape == (CLASSES, WIDTH)
    assert float(noisy.variance) == pytest.approx(8)
    assert not (vector_of(noisy) == 0).any()


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 1e9]))
def test_a_row_changes_all_sums_by_no_more_than_the_sensitivity(seed, size):
    features = size * numbers(9, WIDTH, seed=seed)
    labels = torch.randint(CLASSES, (9,), generator=seeded(seed))
    clipping = clipping_of(numbers(1, seed=seed).item(), 0.7)
    whole, without = (
        vector_of(sums_of(features[:rows], labels[:rows], clipping)) for rows in (9, 8)
    )
    assert float((whole - without).norm()) <= 2**0.5 + 1e-9


@pytest.mark.parametrize("multiplier", [3.73, 1.39])  # of epsilon 1 and 3
def test_many_releases_tell_neighbours_apart_as_the_multiplier_says(multiplier):
    features, labels = 4 * numbers(9, WIDTH), torch.arange(9) % CLASSES
    clipping = clipping_of()
    exact = [vector_of(sums_of(features[i:], labels[i:], clipping)) for i in (0, 1)]
    released = torch.stack(
        [vector_of(sums_of(features, labels, clipping, multiplier)) for _ in range(400)]
    )
    # The best test of one row: along the difference, in deviations of the noise.
    along = (exact[0] - exact[1]) / (exact[0] - exact[1]).norm()
    noise = released - exact[0]
    assert (noise @ along).std() == pytest.approx(
        multiplier * float((exact[0] - exact[1]).norm()), rel=0.12
    )
    # All numbers have their own noise, with one deviation.
    assert noise.std() == pytest.approx(multiplier * 2**0.5, rel=0.03)
    assert torch.linalg.matrix_rank(noise) == noise.shape[1]
    correlation = torch.corrcoef(noise.mT) - torch.eye(noise.shape[1])
    assert correlation.abs().max() < 0.3


def test_noise_is_normal_and_no_seed_repeats_it():
    torch.manual_seed(1)
    first = system_noise(4000)
    torch.manual_seed(1)
    second = system_noise(4000)
    assert kstest(torch.cat([first, second]), "norm").pvalue > 1e-4
    assert not torch.equal(first, second)


def test_no_bits_below_the_noise_are_sent():
    unit = 2.0**-9  # the largest power of 2 that is at most a thousandth of 2.83
    parts = vector_of(USUAL) / unit
    assert torch.equal(parts, parts.round())
    again = NoisySums.unpacked(USUAL.packed(), (CLASSES, WIDTH))
    assert torch.equal(vector_of(again), vector_of(USUAL))
    silent = sums_of(*ROWS, clipping_of(), 2.0, torch.zeros)
    exact = sums_of(*ROWS, clipping_of())
    assert gap(vector_of(silent), vector_of(exact)) <= unit / 2


BAD = {
    "integers": {"counts": torch.ones(CLASSES, dtype=torch.int64)},
    "other-classes": {"counts": torch.ones(CLASSES + 1, dtype=torch.float64)},
    "nan": {"sums": torch.full((CLASSES, WIDTH), torch.nan)},
    "longer-than-rows": {"sums": torch.full((CLASSES, WIDTH), 90.0)},
    "endless-rows": {"counts": torch.full((CLASSES,), torch.inf).double()},
    "far-below-zero": {"counts": torch.tensor([9.0, 9.0, -90.0]).double()},
    "variance-below-0": {"variance": torch.tensor(-1.0).double()},
    "variance-of-each": {"variance": torch.ones(2).double()},
    "endless": {"variance": torch.tensor(torch.inf).double()},
}


@pytest.mark.parametrize("name", BAD)
def test_sums_that_no_rows_and_noise_have_are_refused(name):
    with pytest.raises(UpdateError, match="nois"):
        NoisySums.unpacked({**USUAL.packed(), **BAD[name]}, (CLASSES, WIDTH))


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: {**sent, "gram": sent["sums"]},
        lambda sent: {**sent, "sums": sent["sums"].double()},
        lambda sent: {**sent, "sums": sent["sums"][:, :-1]},
    ],
)
def test_packed_sums_have_one_form(change):
    with pytest.raises(UpdateError, match="noisy sums"):
        NoisySums.unpacked(change(USUAL.packed()), (CLASSES, WIDTH))


@pytest.mark.parametrize("radius", [0.0, -1.0, torch.nan])
def test_a_radius_is_above_zero(radius):
    with pytest.raises(UpdateError, match="radius"):
        clipping_of(radius=radius)


def test_a_mean_of_another_body_is_refused():
    clipping = Clipping(torch.zeros(WIDTH + 1).double(), torch.tensor(1.0).double())
    with pytest.raises(UpdateError, match="features"):
        sums_of(*ROWS, clipping)


# --- public features ---


def public_of(features):
    batches = [{"features": part} for part in features.split(7)]
    return public_features(Identity(), batches, "classifier")


def test_public_features_are_those_of_all_rows():
    features = numbers(30, WIDTH) @ numbers(WIDTH, WIDTH, seed=1) + 3
    public = public_of(features)
    covariance = public.vectors @ torch.diag(public.values) @ public.vectors.mT
    assert covariance.numpy() == pytest.approx(np.cov(features.numpy().T))
    assert public.clipping.mean.numpy() == pytest.approx(features.numpy().mean(0))
    lengths = np.linalg.norm(features.numpy() - features.numpy().mean(0), axis=1)
    longer = (lengths > float(public.clipping.radius)).mean()
    assert longer == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("rows", [0, 1])
def test_too_few_public_rows_are_an_error(rows):
    with pytest.raises(FedrotError, match="row"):
        public_of(numbers(rows, WIDTH))


def test_public_rows_that_are_equal_are_an_error():
    with pytest.raises(UpdateError, match="radius"):
        public_of(torch.ones(9, WIDTH).double())


# --- the fit ---


def drawn(scale=1.0):
    """Return public features, and 400 rows of classes around it, with labels."""
    mixing = numbers(WIDTH, WIDTH, seed=1)
    around = numbers(CLASSES, WIDTH, seed=2)
    labels = torch.arange(400) % CLASSES
    features = scale * ((numbers(400, WIDTH) + around[labels]) @ mixing + 2)
    others = scale * (numbers(400, WIDTH, seed=3) @ mixing + 2)
    return public_of(others), features, labels


def slow_fit(total, public):
    """Return a weight and a bias, up to what all classes share, along eigenvectors."""
    radius = float(public.clipping.radius)
    values, vectors = public.values.numpy() / radius**2, public.vectors.numpy()
    spread = (1 - SHRINKAGE) * values + SHRINKAGE * values.mean()
    variance = float(total.variance)
    counts = np.maximum(total.counts.numpy(), max(1, variance**0.5))
    along = total.sums.numpy() @ vectors
    mean = along.sum(0) / counts.sum()
    weighted = weights = 0.0
    for c in range(len(counts)):
        for k in range(len(spread)):
            error = (variance / counts[c] ** 2 + spread[k] / counts[c]) / spread[k]
            square = (along[c, k] / counts[c] - mean[k]) ** 2 / spread[k]
            weighted += (square - error) / error**2
            weights += 1 / error**2
    t = max(weighted / weights, 1e-6)
    means, unknown = np.zeros_like(along), np.zeros_like(spread)
    for c in range(len(counts)):
        for k in range(len(spread)):
            error = variance / counts[c] ** 2 + spread[k] / counts[c]
            posterior = 1 / (1 / (t * spread[k]) + 1 / error)
            difference = along[c, k] / counts[c] - mean[k]
            means[c, k] = mean[k] + posterior / error * difference
            unknown[k] += counts[c] / counts.sum() * posterior
    inside = TEMPERATURE * (spread + unknown)
    weight = (means / inside) @ vectors.T / radius
    log_priors = np.log(counts / counts.sum())
    bias = log_priors - (means**2 / inside).sum(1) / 2
    return weight, bias - weight @ public.clipping.mean.numpy()


@pytest.mark.parametrize(
    ("multiplier", "scale"), [(0.0, 1.0), (0.6, 1e3), (3.7, 1e-3), (1e6, 1.0)]
)
def test_the_head_is_that_of_the_formulas(multiplier, scale):
    public, features, labels = drawn(scale)
    total = sums_of(features, labels, public.clipping, multiplier)
    weight, bias, priors = fit_to_noisy_sums(total, public)
    logits = (features @ weight.mT + bias).log_softmax(1)
    slow_weight, slow_bias = map(torch.from_numpy, slow_fit(total, public))
    expected = (features @ slow_weight.mT + slow_bias).log_softmax(1)
    assert logits.numpy() == pytest.approx(expected.numpy(), abs=1e-9)
    assert float(priors.sum()) == pytest.approx(1)


def test_a_layer_without_a_bias_has_nearly_the_same_logits():
    public, features, labels = drawn()
    features, mean = features + 50, public.clipping.mean + 50
    clipping = Clipping(mean, public.clipping.radius)
    public = PublicFeatures(clipping, public.values, public.vectors)
    total = sums_of(features, labels, clipping, 0.6)
    logits = []
    for bias in (True, False):
        weight, offset, _ = fit_to_noisy_sums(total, public, bias)
        logits.append((features @ weight.mT + offset).softmax(1))
    assert not offset.any()
    assert (logits[0] - logits[1]).abs().mean() < 0.05


def test_sites_add_up():
    total = USUAL + USUAL.times(0.5)
    assert float(total.variance) == pytest.approx(8 + 2)
    assert torch.equal(vector_of(total), 1.5 * vector_of(USUAL))
