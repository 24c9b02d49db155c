"""Fisher information of real models against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import fedrot
from tests.fedrot.collect.tiny import TINY, Batch, batch_of
from tests.fedrot.oracles import Array
from tests.models import (
    fresh_model,
    inputs,
    randomise,
)

# Fisher information: the brute force


Likelihoods = Callable[[Tensor], list[tuple[float, Tensor]]]


def _squares(model: Any, row: Batch, likelihoods: Likelihoods) -> dict[str, Tensor]:
    """Return ``sum p (grad log p)^2``, one backward pass per term on a graph of its own."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for term in range(len(likelihoods(model(**row).logits.detach()))):
        model.zero_grad()
        share, likelihood = likelihoods(model(**row).logits)[term]
        likelihood.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] += share * parameter.grad.square()
    model.zero_grad()
    return total


def _expected(model: Any, batch: Batch, likelihoods: Likelihoods) -> dict[str, Tensor]:
    """Return the mean over rows."""
    rows = len(batch["input_ids"])
    total: dict[str, Tensor] = {}
    for i in range(rows):
        row = {name: value[i : i + 1] for name, value in batch.items()}
        for name, value in _squares(model, row, likelihoods).items():
            total[name] = total.get(name, 0) + value / rows
    return total


def _matches(found: Mapping[str, Mapping[str, Tensor]], expected: Mapping[str, Tensor]) -> None:
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
        assert bool((computed >= 0).all())
        bound = 1e-4 * float(value.max()) + 1e-10 * largest
        assert (computed - value).abs().max() <= bound, name


def _single(logits: Tensor) -> list[tuple[float, Tensor]]:
    z = logits[0]
    log_p = [z[y] - z.exp().sum().log() for y in range(len(z))]
    return [(float(value.detach().exp()), value) for value in log_p]


def _several(logits: Tensor) -> list[tuple[float, Tensor]]:
    """Every set of labels, each label on or off."""
    terms = []
    for labels in itertools.product((0, 1), repeat=logits.shape[1]):
        value = sum((logsigmoid(z if y else -z) for y, z in zip(labels, logits[0], strict=True)))
        assert isinstance(value, Tensor)
        terms.append((float(value.detach().exp()), value))
    return terms


def _scores(logits: Tensor) -> list[tuple[float, Tensor]]:
    """Gauss-Hermite quadrature of ``y ~ N(z, 1)``, exact for polynomials of degree 5."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(3)
    weights = weights / weights.sum()
    terms = []
    for chosen in itertools.product(range(3), repeat=logits.shape[1]):
        y = logits[0].detach() + torch.tensor(nodes[list(chosen)])
        terms.append((float(np.prod(weights[list(chosen)])), -((y - logits[0]) ** 2).sum() / 2))
    return terms


def _classifier(labels: int, problem: str | None = None, seed: int = 0) -> Any:
    """Return a one-layer classifier of its own."""
    settings: dict[str, Any] = {**TINY, "num_labels": labels, "problem_type": problem}
    config = transformers.BertConfig(**settings)
    return randomise(transformers.BertForSequenceClassification(config).double(), seed).eval()


@pytest.mark.parametrize(
    ("labels", "problem", "likelihoods"),
    [
        (2, None, _single),
        (3, None, _single),
        (8, "single_label_classification", _single),
        (3, "multi_label_classification", _several),
        (1, "multi_label_classification", _several),
        (1, None, _scores),
        (1, "regression", _scores),
        (2, "regression", _scores),
    ],
)
def test_fisher_is_the_expectation_over_the_models_own_labels(
    labels: int, problem: str | None, likelihoods: Likelihoods
) -> None:
    model, batch = _classifier(labels, problem), batch_of(1)
    expected = _expected(model, batch, likelihoods)
    _matches(fedrot.collect_fisher(model, [batch]), expected)
    split = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]
    # The data's labels are not looked at, and seeds decide nothing where nothing is sampled.
    split[0]["labels"] = torch.tensor([-7, 99])
    _matches(fedrot.collect_fisher(model, split, seed=5), expected)


@pytest.mark.parametrize("name", ["bert-classifier", "roberta-classifier", "distilbert-classifier"])
def test_fisher_of_every_family_of_classifiers(name: str) -> None:
    model = fresh_model(name)
    _matches(fedrot.collect_fisher(model, [inputs()]), _expected(model, inputs(), _single))


def test_choices_of_a_question_are_its_labels() -> None:
    model = fresh_model("bert-choice")
    batch = {key: torch.stack([v[:2], v[1:3]]) for key, v in batch_of(1).items()}
    _matches(fedrot.collect_fisher(model, [batch]), _expected(model, batch, _single))


def _own_loss(model: Any, batch: Batch, factor: Callable[[Batch], float]) -> dict[str, Tensor]:
    """Return the mean over rows of the squared gradient of the model's own loss times a factor."""
    rows = len(batch["input_ids"])
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(rows):
        row = {name: value[i : i + 1] for name, value in batch.items()}
        model.zero_grad()
        (model(**row).loss * factor(row)).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad.square() / rows
    model.zero_grad()
    return total


@pytest.mark.parametrize(
    ("labels", "problem", "targets", "factor"),
    [
        (3, "single_label_classification", [2, 0, 1], 1.0),
        (12, "single_label_classification", [2, 11, 1], 1.0),
        (3, "multi_label_classification", [[0.0, 1, 1], [1, 0, 0], [0, 0, 0]], 3.0),
        (1, "regression", [0.5, -1.0, 2.0], 0.5),
    ],
)
def test_the_empirical_fisher_squares_the_gradients_of_the_models_own_loss(
    labels: int, problem: str, targets: list[Any], factor: float
) -> None:
    """The loss of transformers is a mean over labels, and a squared error without the half."""
    model = _classifier(labels, problem)
    batch = {**batch_of(1), "labels": torch.tensor(targets)}
    if problem != "single_label_classification":
        batch["labels"] = batch["labels"].double()
    expected = _own_loss(model, batch, lambda _: factor)
    _matches(fedrot.collect_fisher(model, [batch], labels="data"), expected)


def test_the_kind_of_label_is_guessed_as_transformers_guesses_it() -> None:
    """Without a ``problem_type``, labels that are not integers are several labels at once."""
    batch = {**batch_of(1), "labels": torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0]]).double()}
    expected = _own_loss(_classifier(3), batch, lambda _: 3.0)
    _matches(fedrot.collect_fisher(_classifier(3), [batch], labels="data"), expected)


@pytest.mark.parametrize("name", ["bert-mlm", "bert-tokens"])
def test_the_empirical_fisher_of_tokens_counts_the_labelled_positions(name: str) -> None:
    model, batch = fresh_model(name), inputs()
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, 2], labels[0, 5], labels[1, 1] = 1, 0, 2
    batch["labels"] = labels
    expected = _own_loss(model, batch, lambda row: float((row["labels"] >= 0).sum()))
    _matches(fedrot.collect_fisher(model, [batch], labels="data"), expected)


def test_the_empirical_fisher_of_a_causal_model_is_of_the_next_token() -> None:
    model, batch = fresh_model("bert-causal"), {"input_ids": inputs()["input_ids"]}
    batch["labels"] = batch["input_ids"].clone()
    expected = _own_loss(model, batch, lambda row: float(row["labels"].shape[1] - 1))
    _matches(fedrot.collect_fisher(model, [batch], labels="data"), expected)


def test_a_discriminator_labels_every_token() -> None:
    """ELECTRA's discriminator gives one logit per token: real or replaced."""
    model, batch = fresh_model("electra-discriminator"), {"input_ids": inputs()["input_ids"][:, :4]}
    _matches(fedrot.collect_fisher(model, [batch]), _expected(model, batch, _several))


# Sampled labels


def _outcomes(model: Any, row: Batch, seeds: int, key: str, every: list[Tensor]) -> np.ndarray:
    """Return how often each possible outcome was drawn; all are told apart by one parameter."""
    counts = np.zeros(len(every))
    for seed in range(seeds):
        found = fedrot.collect_fisher(model, [row], seed=seed)["fisher"][key]
        errors = torch.stack([(found - value).abs().max() / value.max() for value in every])
        assert errors.min() <= 1e-5
        assert errors.sort().values[1] > 1e-3
        counts[int(errors.argmin())] += 1
    return counts


def _follows(counts: np.ndarray, shares: Array) -> None:
    """Chi-squared far from its tail; the seeds are fixed, so this passes always or never."""
    expected = shares / shares.sum() * counts.sum()
    common = expected >= 5
    assert common.sum() >= 3
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert statistic <= common.sum() + 4 * np.sqrt(2 * common.sum())
    assert counts[~common].sum() <= 3 * expected[~common].sum() + 5


def test_many_labels_are_sampled_from_the_model() -> None:
    """Each seed gives the squared gradient of one label, as often as the model gives that label."""
    model, batch = _classifier(9), batch_of(1, rows=1)
    terms = _single(model(**batch).logits)
    every = []
    for y in range(9):

        def likelihood(z: Tensor, y: int = y) -> list[tuple[float, Tensor]]:
            return [(1.0, _single(z)[y][1])]

        every.append(_squares(model, batch, likelihood)["classifier.bias"])
    counts = _outcomes(model, batch, 300, "classifier.bias", every)
    _follows(counts, np.array([share for share, _ in terms]))
    assert counts.sum() == 300


def _tokens(labels: int) -> Any:
    settings: dict[str, Any] = {**TINY, "num_labels": labels}
    config = transformers.BertConfig(**settings)
    return randomise(transformers.BertForTokenClassification(config).double()).eval()


def test_tokens_are_labelled_by_samples_of_the_model_except_for_padding() -> None:
    model = _tokens(2)
    row = {"input_ids": torch.tensor([[5, 9, 23, 11]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    log_p = model(**row).logits.detach()[0, :3].log_softmax(-1)
    every, shares = [], []
    for labels in itertools.product((0, 1), repeat=3):

        def likelihood(z: Tensor, labels: tuple[int, ...] = labels) -> list[tuple[float, Tensor]]:
            picked = [z[0, t].log_softmax(-1)[y] for t, y in enumerate(labels)]
            return [(1.0, picked[0] + picked[1] + picked[2])]

        every.append(_squares(model, row, likelihood)["classifier.weight"])
        shares.append(float(sum(log_p[t, y] for t, y in enumerate(labels)).exp()))
    counts = _outcomes(model, row, 200, "classifier.weight", every)
    _follows(counts, np.array(shares))


def test_samples_depend_on_the_seed_alone() -> None:
    model, batch = _classifier(9), batch_of(1)
    state = torch.get_rng_state()
    first, again, other = (
        fedrot.collect_fisher(model, [batch], seed=seed)["fisher"] for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


# What else collect_fisher promises


def test_fisher_leaves_the_model_as_it_was() -> None:
    model = _classifier(3).train()
    model.bert.encoder.eval()
    model.bert.embeddings.requires_grad_(False)
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    modes = {name: module.training for name, module in model.named_modules()}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        first, second = (fedrot.collect_fisher(model, [batch_of(1)])["fisher"] for _ in range(2))
        assert not torch.is_grad_enabled()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert {name: module.training for name, module in model.named_modules()} == modes
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert (parameter.grad is None) == (name != "classifier.weight")
    assert torch.equal(model.classifier.weight.grad, torch.ones_like(model.classifier.weight))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert first.keys() == trained
    assert not any(key.startswith("bert.embeddings") for key in trained)
    assert not any(value.requires_grad for value in first.values())


def test_parameters_that_the_output_does_not_depend_on_have_no_information() -> None:
    model = _tokens(2)
    model.spare = nn.Linear(2, 2).double()
    found = fedrot.collect_fisher(model, [batch_of(1)])["fisher"]
    assert found["spare.weight"].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("most", [1, 2, 4])
def test_no_more_rows_are_used_than_asked_for(most: int) -> None:
    model = _classifier(3)
    taken = []

    def batches() -> Iterator[Batch]:
        for seed in range(3):
            taken.append(seed)
            yield batch_of(seed)

    found = fedrot.collect_fisher(model, batches(), max_rows=most)
    assert len(taken) == (most + 2) // 3
    joined = {key: torch.cat([batch_of(seed)[key] for seed in range(3)])[:most] for key in batch_of(0)}
    _matches(found, _expected(model, joined, _single))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fisher_of_other_precisions(dtype: torch.dtype) -> None:
    model = _classifier(3).to(dtype)
    found = fedrot.collect_fisher(model, [batch_of(1)])["fisher"]
    assert {value.dtype for value in found.values()} <= {dtype, torch.float32}
    exact = _expected(_classifier(3), batch_of(1), _single)["classifier.bias"]
    assert (found["classifier.bias"] - exact).abs().max() <= 0.1 * exact.max()


def test_small_information_survives_half_precision() -> None:
    """float16 holds nothing below 6e-8: squares of small gradients must not all become zero."""
    model = _classifier(3)
    with torch.no_grad():
        model.classifier.weight.mul_(1e-3)
    exact = _expected(model, batch_of(1), _single)
    found = fedrot.collect_fisher(model.half(), [batch_of(1)])["fisher"]
    lost = [key for key, value in exact.items() if value.max() > 1e-12 and not found[key].any()]
    assert lost == []


def test_what_cannot_be_computed_is_refused() -> None:
    model = _classifier(3)
    with pytest.raises(fedrot.FedrotError, match="rows"):
        fedrot.collect_fisher(model, [])
    with pytest.raises(fedrot.FedrotError, match="rows"):
        fedrot.collect_fisher(model, [batch_of(1)], max_rows=0)
    with pytest.raises(fedrot.FedrotError, match="labels"):
        fedrot.collect_fisher(model, [batch_of(1)], labels="data")


def test_an_unknown_source_of_labels_is_refused() -> None:
    with pytest.raises(fedrot.FedrotError, match="labels"):
        fedrot.collect_fisher(_classifier(3), [batch_of(1)], labels="dat")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bert-qa", "bert-pretraining"])
def test_models_without_logits_are_refused(name: str) -> None:
    with pytest.raises(fedrot.FedrotError, match="logits"):
        fedrot.collect_fisher(fresh_model(name), [inputs()])


def test_a_failing_model_gets_its_mode_back() -> None:
    class Broken(nn.Module):
        config = SimpleNamespace()

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2).eval()

        def forward(self, x: Tensor) -> Any:
            raise ValueError("out of luck")

    model = Broken()
    with pytest.raises(ValueError, match="luck"):
        fedrot.collect_fisher(model, [{"x": torch.ones(1, 2)}])
    assert (model.training, model.inner.training) == (True, False)


def test_a_model_that_trains_nothing_is_refused() -> None:
    model = fresh_model("bert-classifier").requires_grad_(False)
    with pytest.raises(fedrot.FedrotError, match="requires_grad is false for all"):
        fedrot.collect_fisher(model, [batch_of(1)])
