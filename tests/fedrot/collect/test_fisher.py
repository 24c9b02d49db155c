"""Fisher information of real models against brute force."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from fedrot import FedrotError, collect_fisher
from tests.families import VOCABULARY, model_of
from tests.fedrot.collect.tiny import batch_of, tiny_classifier
from tests.fedrot.oracles import gap
from tests.models import fresh_model, inputs, randomise, same


def mean_squares(model, batch, terms):
    """Return the mean over rows of ``sum p (grad log p)^2``, one backward pass per term
    on a graph of its own.
    """
    rows = len(batch["input_ids"])
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(rows):
        row = {name: value[i : i + 1] for name, value in batch.items()}
        for term in range(len(terms(model, row))):
            model.zero_grad()
            share, likelihood = terms(model, row)[term]
            likelihood.backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    total[name] += share * parameter.grad.square() / rows
    model.zero_grad()
    return total


def brute_force(model, batch, likelihoods):
    """Return the expectation over all outcomes of the logits."""
    return mean_squares(model, batch, lambda net, row: likelihoods(net(**row).logits))


def tiny(labels, problem=None, **how):
    """Return a one-layer model of its own, float64."""
    model = tiny_classifier("bert", num_labels=labels, problem_type=problem, **how)
    return randomise(model.double()).eval()


def weighted(likelihoods):
    """Return log likelihoods with their probabilities."""
    return [(float(value.detach().exp()), value) for value in likelihoods]


def matches(found, expected):
    assert found.keys() == {"fisher"}
    # Tied parameters are listed under every name.
    values = {id(value) for value in found["fisher"].values()}
    assert found["fisher"].keys() >= expected.keys()
    assert len(values) == len(expected)
    largest = max(float(value.max()) for value in expected.values())
    assert largest > 0
    for name, value in expected.items():
        computed = found["fisher"][name]
        assert (computed.dtype, computed.shape) == (value.dtype, value.shape)
        bound = 1e-4 * float(value.max()) + 1e-10 * largest
        assert gap(computed, value) <= bound, name


def one_label(logits):
    return weighted([*(logits[0] - logits[0].exp().sum().log())])


def several_labels(logits):
    """Every set of labels, each label on or off."""
    signs = itertools.product((-1, 1), repeat=logits.shape[1])
    return weighted([logsigmoid(torch.tensor(s) * logits[0]).sum() for s in signs])


def scores(logits):
    """Gauss-Hermite quadrature of ``y ~ N(z, 1)``, exact for polynomials of degree
    5.
    """
    nodes, weights = map(torch.tensor, np.polynomial.hermite_e.hermegauss(3))
    terms = []
    for chosen in map(list, itertools.product(range(3), repeat=logits.shape[1])):
        y = logits[0].detach() + nodes[chosen]
        share = float((weights / weights.sum())[chosen].prod())
        terms.append((share, -((y - logits[0]) ** 2).sum() / 2))
    return terms


# Exact expectations

FOUR_TOKENS = {"input_ids": inputs()["input_ids"][:, :4]}
#: Model, its batch, and the likelihoods of its own labels.
EXACT = {
    "two labels": (lambda: tiny(2), batch_of(1), one_label),
    "several labels": (
        lambda: tiny(3, "multi_label_classification"),
        batch_of(1),
        several_labels,
    ),
    "on or off": (
        lambda: tiny(1, "multi_label_classification"),
        batch_of(1),
        several_labels,
    ),
    "a score": (lambda: tiny(1), batch_of(1), scores),
    "two scores": (lambda: tiny(2, "regression"), batch_of(1), scores),
    "choices": (
        lambda: fresh_model("bert-choice"),
        {key: torch.stack([v[:2], v[1:3]]) for key, v in batch_of(1).items()},
        one_label,
    ),
    # ELECTRA's discriminator gives one logit per token: real or replaced.
    "tokens": (
        lambda: fresh_model("electra-discriminator"),
        FOUR_TOKENS,
        several_labels,
    ),
    "tokens, padded": (
        lambda: fresh_model("electra-discriminator"),
        {**FOUR_TOKENS, "attention_mask": torch.tensor([[1, 1, 1, 0]] * 2)},
        lambda z: several_labels(z[:, :3]),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_fisher_is_the_expectation_over_the_models_own_labels(name):
    build, batch, likelihoods = EXACT[name]
    model = build()
    expected = brute_force(model, batch, likelihoods)
    split = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]
    # The data's labels are not looked at, and seeds decide nothing where nothing is
    # sampled.
    split[0]["labels"] = torch.tensor([-7, 99])
    matches(collect_fisher(model, split, seed=5), expected)


# Labels of the data


def some_tokens(ids):
    labels = torch.full_like(ids, -100)
    labels[0, 2], labels[0, 5], labels[1, 1] = 1, 0, 2
    return labels


SETS = [[0.0, 1, 1], [1, 0, 0], [0, 0, 0]]
#: Model, its batch, labels, and what makes its loss the sum of log likelihoods of a
#: row.
EMPIRICAL = {
    "one label": (
        lambda: tiny(12, "single_label_classification"),
        batch_of(1),
        torch.tensor([2, 11, 1]),
        lambda _: 1,
    ),
    "several labels, guessed": (
        lambda: tiny(3),
        batch_of(1),
        torch.tensor(SETS).double(),
        lambda _: 3,
    ),
    "a score": (
        lambda: tiny(1),
        batch_of(1),
        torch.tensor([0.5, -1.0, 2.0]).double(),
        lambda _: 0.5,
    ),
    "tied tables": (
        lambda: fresh_model("bert-mlm"),
        inputs(),
        some_tokens(inputs()["input_ids"]),
        lambda labels: float((labels >= 0).sum()),
    ),
    "the next token": (
        lambda: fresh_model("bert-causal"),
        {"input_ids": inputs()["input_ids"]},
        inputs()["input_ids"],
        lambda labels: float(labels.shape[1] - 1),
    ),
}


@pytest.mark.parametrize("name", EMPIRICAL)
def test_the_empirical_fisher_squares_the_gradients_of_the_models_own_loss(
    name,
):
    """The loss of transformers is a mean over labels, and a squared error without the
    half.
    """
    build, batch, labels, factor = EMPIRICAL[name]
    batch = {**batch, "labels": labels}
    # A second model: transformers stores the kind of label that it has guessed.
    expected = mean_squares(
        build(), batch, lambda net, row: [(1, net(**row).loss * factor(row["labels"]))]
    )
    matches(collect_fisher(build(), [batch], labels="data"), expected)


# Sampled labels


def outcomes(model, row, key, likelihoods, seeds):
    """Check that each seed gives the squares of one outcome, drawn as often as the
    model says.

    Chi-squared is far from its tail. The seeds are fixed, so this passes always or
    never.
    """
    shares = np.array([share for share, _ in likelihoods(model(**row).logits.detach())])
    every = [
        brute_force(model, row, lambda z, i=i: [(1, likelihoods(z)[i][1])])[key]
        for i in range(len(shares))
    ]
    drawn = Counter()
    for seed in range(seeds):
        found = collect_fisher(model, [row], seed=seed)["fisher"][key]
        errors = [gap(found, value) / value.max() for value in every]
        least, second, *_ = sorted(errors)
        assert least <= 1e-5
        assert second > 1e-3
        drawn[errors.index(least)] += 1
    counts = np.array([drawn[i] for i in range(len(shares))])
    expected = shares / shares.sum() * seeds
    common = expected >= 5
    assert common.sum() >= 3
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert statistic <= common.sum() + 4 * np.sqrt(2 * common.sum())
    assert counts[~common].sum() <= 3 * expected[~common].sum() + 5


def test_many_labels_are_sampled_from_the_model():
    outcomes(tiny(9), batch_of(1, rows=1), "classifier.bias", one_label, 150)


def test_many_labels_at_once_are_sampled_from_the_model():
    """The gradient of a label's bias is ``1 - p`` for a label that is on, ``-p`` for
    one that is off.
    """
    model = tiny(9, "multi_label_classification")
    row = batch_of(1, rows=1)
    p = model(**row).logits[0].detach().sigmoid()
    each = [
        collect_fisher(model, [row], seed=seed)["fisher"]["classifier.bias"]
        for seed in range(100)
    ]
    found = torch.stack(each)
    on, off = ((found - value.square()).abs() < 1e-6 for value in (1 - p, p))
    assert bool((on | off).all())
    apart = (on.double().mean(0) - p).abs()
    assert bool((apart <= 4 * (p * (1 - p) / 100).sqrt()).all())


def test_tokens_are_labelled_by_samples_of_the_model_except_for_padding():
    row = {
        "input_ids": torch.tensor([[5, 9, 23, 11]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0]]),
    }

    def terms(logits):
        log_p = logits[0, :3].log_softmax(-1)
        labels = itertools.product((0, 1), repeat=3)
        return weighted([log_p[range(3), each].sum() for each in labels])

    outcomes(tiny(2, task="TokenClassification"), row, "classifier.weight", terms, 120)


def test_the_mask_of_a_decoder_is_its_own():
    text, answer = (
        batch_of(seed, 2, length, seed, VOCABULARY) for seed, length in ((1, 6), (2, 4))
    )
    mask = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0]])
    batch = {**text, "decoder_input_ids": answer["input_ids"]}
    batch["decoder_attention_mask"] = mask
    none, some = (
        collect_fisher(
            model_of("t5-gated"), [{k: v[i : i + 1] for k, v in batch.items()}]
        )["fisher"]
        for i in range(2)
    )
    assert not any(value.any() for value in none.values())
    assert all(value.any() for key, value in some.items() if "wo" in key)


def test_samples_depend_on_the_seed_alone():
    model = tiny(9)
    batch = batch_of(1)
    state = torch.get_rng_state()
    first, again, other = (
        collect_fisher(model, [batch], seed=seed)["fisher"] for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first, again)
    assert any(not torch.equal(first[key], other[key]) for key in first)


# What else collect_fisher promises


def test_only_trained_parameters_have_information_and_gradients_stay():
    model = tiny(3)
    model.spare = nn.Linear(2, 2).double()
    model.bert.embeddings.requires_grad_(False)
    weight = model.classifier.weight
    weight.grad = torch.ones_like(weight)
    with torch.no_grad():
        found = collect_fisher(model, [batch_of(1)])["fisher"]
    parameters = dict(model.named_parameters())
    assert found.keys() == {
        name for name in parameters if not name.startswith("bert.embeddings")
    }
    assert not any(value.requires_grad for value in found.values())
    # Nothing depends on these.
    assert not found["spare.weight"].any()
    assert bool((weight.grad == 1).all())
    del parameters["classifier.weight"]
    assert all(parameter.grad is None for parameter in parameters.values())


@pytest.mark.parametrize("most", [1, 2, 4])
def test_no_more_rows_are_used_than_asked_for(most):
    model = tiny(3)
    every = [batch_of(seed) for seed in range(3)]
    batches = iter(every)
    found = collect_fisher(model, batches, max_rows=most)
    assert len([*batches]) == 3 - (most + 2) // 3
    joined = {
        key: torch.cat([batch[key] for batch in every])[:most] for key in every[0]
    }
    matches(found, brute_force(model, joined, one_label))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fisher_of_other_precisions_is_float32(dtype):
    """float16 holds nothing below 6e-8: squares of small gradients must not all become
    zero.
    """
    model = tiny(3)
    with torch.no_grad():
        model.classifier.weight.mul_(1e-3)
    exact = brute_force(model, batch_of(1), one_label)
    found = collect_fisher(model.to(dtype), [batch_of(1)])["fisher"]
    for key, value in exact.items():
        assert found[key].dtype == torch.float32
        assert value.max() <= 1e-12 or found[key].any()
    bias = exact["classifier.bias"]
    assert gap(found["classifier.bias"], bias) <= 0.1 * bias.max()


ONE = [batch_of(1)]


@pytest.mark.parametrize(
    ("model", "batches", "options", "word"),
    [
        (tiny(3), [], {}, "rows"),
        (tiny(3), ONE, {"max_rows": 0}, "rows"),
        (tiny(3), ONE, {"labels": "data"}, "'labels'"),
        (tiny(3), ONE, {"labels": "dat"}, "labels is 'dat'"),
        (fresh_model("bert-qa"), ONE, {}, "no logits"),
        (tiny(3).requires_grad_(False), ONE, {}, "requires_grad is false for all"),
    ],
)
def test_what_cannot_be_computed_is_refused(model, batches, options, word):
    with pytest.raises(FedrotError, match=word):
        collect_fisher(model, batches, **options)
