"""Task heads of several labels a row and of regressions, against fits to the rows themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedrot.errors import FedrotError, UpdateError
from fedrot.head import ClassSums, collect_classes, fit_head, fit_heads, head_of, with_head
from fedrot.problems import PROBLEMS, REGRESSION, SEVERAL, SINGLE, problem_of
from fedrot.temperature import ONE, TEMPERATURES, Heads, best_temperature, collect_losses, compare_losses
from tests.fedrot.collect.tiny import batch_of, tiny_classifier
from tests.fedrot.oracles import Array, seeded
from tests.models import randomise

OUTPUTS = 3
SEEDS, SIZES, PARTS = (
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.sampled_from((0.0, 0.01, 0.3, 1.0)),
)
ANY = st.sampled_from((*PROBLEMS,))


def sums_of(features: Array, labels: Array, problem: str) -> ClassSums:
    """Return the sums over rows."""
    one_hot = (labels == np.arange(OUTPUTS)).astype(float)
    factors = one_hot if problem == SINGLE else np.insert(labels, 0, 1, axis=1)
    terms = (factors.sum(0), factors.T @ features, features.T @ features)
    counts, sums, gram = map(torch.from_numpy, terms)
    return ClassSums(counts, sums, gram, problem)


def drawn(problem: str, seed: int, rows: int = 40, size: int = 5) -> tuple[Array, Array]:
    """Return features and labels that depend on them."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, size)) @ random.normal(size=(size, size)) + 1
    values = features @ random.normal(size=(size, OUTPUTS)) + random.normal(size=(rows, OUTPUTS))
    if problem == SINGLE:
        return features, np.concatenate([np.arange(OUTPUTS), values.argmax(1)])[:rows, None]
    return features, (values > values.mean(0)).astype(float) if problem == SEVERAL else values + 7


def of_two_classes(features: Array, has: Array, shrinkage: float) -> tuple[Array, float]:
    """Return the log odds of the discriminant between rows with and without a label."""
    groups, size = [features[has == value] for value in (1, 0)], features.shape[1]
    one, other = (group.mean(0) for group in groups)
    apart = np.concatenate([group - group.mean(0) for group in groups])
    within = apart.T @ apart / len(features)
    shrunk = (1 - shrinkage) * within + shrinkage * np.trace(within) / size * np.eye(size)
    weight = np.linalg.solve(shrunk, one - other)
    return weight, np.log(len(groups[0]) / len(groups[1])) - weight @ (one + other) / 2


@settings(max_examples=60, deadline=None)
@given(SEEDS, SIZES, PARTS)
def test_every_label_has_a_discriminant_of_two_classes(seed: int, size: int, part: float) -> None:
    features, labels = drawn(SEVERAL, seed, size=size)
    weights, biases = fit_heads(sums_of(features, labels, SEVERAL), (part, 0.5))
    for shrinkage, weight, bias in zip((part, 0.5), weights, biases, strict=True):
        for index in range(OUTPUTS):
            expected = of_two_classes(features, labels[:, index], shrinkage)
            np.testing.assert_allclose(weight[index].numpy(), expected[0], rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(bias[index].numpy(), expected[1], rtol=1e-6, atol=1e-7)


def test_a_label_of_no_row_or_of_every_row_has_log_odds_alone() -> None:
    features, labels = drawn(SEVERAL, 0)
    labels[:, 0], labels[:, 2] = 0, 1
    sums = sums_of(features, labels, SEVERAL)
    weight, bias = fit_head(sums)
    assert weight.any(1).tolist() == [False, True, False]
    np.testing.assert_allclose(bias[[0, 2]].numpy(), [np.log(0.5 / 40.5), np.log(40.5 / 0.5)])
    same, moved = fit_head(sums, priors=torch.tensor([100.0, 20, 30, 100]).double())
    odds = np.log(30 / 70) - np.log(labels[:, 1].sum() / (40 - labels[:, 1].sum()))
    np.testing.assert_allclose((moved - bias)[1].numpy(), odds)
    np.testing.assert_allclose(moved[0].numpy(), np.log(20.5 / 80.5))
    assert torch.equal(same, weight)


@settings(max_examples=60, deadline=None)
@given(SEEDS, SIZES, PARTS)
def test_a_regression_is_ridge_regression(seed: int, size: int, shrinkage: float) -> None:
    features, labels = drawn(REGRESSION, seed, size=size)
    weight, bias = fit_head(sums_of(features, labels, REGRESSION), shrinkage)
    apart, root = features - features.mean(0), np.sqrt((1 - shrinkage) / len(features))
    ridge = np.sqrt(shrinkage * (apart**2).mean()) * np.eye(size)
    rows = np.concatenate([root * apart, ridge])
    values = np.concatenate([root * (labels - labels.mean(0)), np.zeros((size, OUTPUTS))])
    expected = torch.linalg.lstsq(*map(torch.from_numpy, (rows, values))).solution.mT
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-8)
    # The mean residual is 0.
    residuals = features @ weight.numpy().T + bias.numpy() - labels
    np.testing.assert_allclose(residuals.mean(0), 0, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(SEEDS, ANY, st.booleans())
def test_rotated_features_have_the_same_logits(seed: int, problem: str, biased: bool) -> None:
    features, labels = drawn(problem, seed)
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(5, 5)))[0]
    logits = []
    for own in (features, features @ rotation):
        weight, bias = fit_head(sums_of(own, labels, problem), 0.1, biased)
        logits.append(own @ weight.numpy().T + bias.numpy())
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-7, atol=1e-7)


@settings(max_examples=80, deadline=None)
@given(SEEDS, ANY, st.integers(1, 40), st.sampled_from((0.0, 100.0)))
def test_packed_sums_of_clients_have_the_head_of_all_rows(
    seed: int, problem: str, rows: int, offset: float
) -> None:
    """Also if means are 100 times the deviations, and if units differ in size; no sums are refused."""
    (features, labels), clients = drawn(problem, seed, rows), 1 + seed % 4
    features = (features + offset) * 10.0 ** np.random.default_rng(seed).integers(-4, 3, size=5)
    features[:, 0] = 0.1 if seed % 3 else features[:, 0]
    labels += offset if problem == REGRESSION else 0
    owner = np.random.default_rng(seed).integers(clients, size=rows)
    parts = [sums_of(features[owner == c], labels[owner == c], problem) for c in sorted(set(owner))]
    sent = [ClassSums.unpacked(part.packed(), (OUTPUTS, 5), problem) for part in parts]
    total = sum(sent[1:], sent[0])
    assert total.rows == rows
    if rows < 20:
        return
    fits = [fit_head(sums, 0.1) for sums in (sums_of(features, labels, problem), total)]
    logits, found = (features @ weight.numpy().T + bias.numpy() for weight, bias in fits)
    assert np.abs(found - logits).max() <= 1e-4 * np.abs(logits - logits.mean(0)).max()


@pytest.mark.parametrize(
    ("problem", "change", "message"),
    [
        (SEVERAL, lambda s: {"counts": -s.counts}, "number of rows is not positive"),
        (REGRESSION, lambda s: {"counts": 0 * s.counts}, "number of rows is not positive"),
        (SEVERAL, lambda s: {"counts": s.counts * torch.tensor([1, -1, 1, 1])}, "contradict"),
        (SEVERAL, lambda s: {"counts": s.counts * torch.tensor([1, 1, 9, 1])}, "contradict"),
        (SEVERAL, lambda s: {"counts": s.counts * torch.tensor([1, 0, 1, 1])}, "contradict"),
        (SEVERAL, lambda s: {"sums": s.sums * torch.tensor([1, 1, 1, 4])[:, None]}, "contradict"),
        (REGRESSION, lambda s: {"gram": s.gram / 9}, "negative eigenvalues"),
    ],
)
def test_sums_that_no_rows_have_are_refused(
    problem: str, change: Callable[[ClassSums], dict[str, Any]], message: str
) -> None:
    sums = sums_of(*drawn(problem, 0), problem)
    with pytest.raises(UpdateError, match=message):
        replace(sums, **change(sums))


def test_sums_of_different_problems_do_not_add_up() -> None:
    several, regression = (sums_of(*drawn(problem, 0), problem) for problem in (SEVERAL, REGRESSION))
    with pytest.raises(UpdateError, match=r"multi_label_classification.* and of .*regression"):
        several + regression


# Models


def batches_of(problem: str, outputs: int = OUTPUTS) -> list[dict[str, Tensor]]:
    """Return two batches, in each of which one row has no labels."""
    found = [batch_of(rows, rows) for rows in (20, 5)]
    for batch in found:
        values = torch.randn(len(batch["input_ids"]), outputs, generator=seeded(len(batch["input_ids"])))
        batch["labels"] = (values > 0).float() if problem == SEVERAL else values
        batch["labels"][2] = torch.nan
    return found


def logits_of(model: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    with torch.no_grad():
        given = [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in batches]
        return torch.cat([copy.deepcopy(model).eval()(**batch).logits for batch in given])


def loss(logits: Tensor, labels: Tensor, problem: str, temperature: float = 1.0) -> float:
    """Return the summed loss, from its definition."""
    if problem == REGRESSION:
        return float(((logits - labels) ** 2).sum())
    probability = 1 / (1 + (-logits / temperature).exp())
    return float(-(labels * probability.log() + (1 - labels) * (1 - probability).log()).sum())


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize(("problem", "outputs"), [(SEVERAL, 3), (REGRESSION, 3), (None, 1)])
def test_a_model_has_the_head_and_losses_of_its_rows(
    kind: str, problem: str | None, outputs: int
) -> None:
    model = randomise(tiny_classifier(kind, num_labels=outputs, problem_type=problem)).double().train()
    name, bare = problem_of(model.config), copy.deepcopy(model)
    batches, head = batches_of(name, outputs), head_of(model.config, model.state_dict())
    setattr(bare, head, nn.Identity())
    labels = torch.cat([batch["labels"] for batch in batches]).double()
    kept = ~labels.isnan().any(1)
    features, labels = logits_of(bare, batches)[kept], labels[kept]
    found = collect_classes(model, batches, head)
    expected = sums_of(features.numpy(), labels.numpy(), name)
    for ours, theirs in zip(
        (found.counts, found.sums, found.gram), vars(expected).values(), strict=False
    ):
        torch.testing.assert_close(ours, theirs)
    before, (weight, bias) = collect_losses(model, batches), fit_head(found, 0.1, bias=kind == "bert")
    model.load_state_dict(with_head(model.state_dict(), head, weight, bias))
    after, logits = collect_losses(model, batches), features @ weight.mT + bias
    torch.testing.assert_close(logits_of(model, batches)[kept], logits)
    for temperature, value in zip(TEMPERATURES, after.losses[0].tolist(), strict=True):
        assert value == pytest.approx(loss(logits, labels, name, temperature))
    assert after.losses[0, ONE] < before.losses[0, ONE]
    right = int(((logits > 0) == (labels > 0)).all(1).sum()) if name == SEVERAL else 0
    assert after.counts.tolist() == [23, right]
    assert name == SEVERAL or best_temperature(after) == 1
    heads = Heads(weight.expand(2, -1, -1), bias.expand(2, -1), torch.tensor([-1, 0]))
    both = compare_losses([model], batches, head, [heads])
    torch.testing.assert_close(both.losses, after.losses.expand(2, -1))
    torch.testing.assert_close(both.squares, torch.cat([after.squares, 0 * after.squares]))


@pytest.mark.parametrize(
    ("problem", "labels", "message"),
    [
        (SEVERAL, torch.ones(5, 3).long(), r"labels are torch.int64 \[5, 3\]"),
        (SEVERAL, torch.ones(5), r"labels are torch.float32 \[5\], the logits \[5, 3\]"),
        (SEVERAL, torch.full((5, 3), 0.5), "each 0 or 1"),
        (REGRESSION, torch.full((5, 3), torch.inf), "each finite"),
        (REGRESSION, torch.tensor([[1, torch.nan, 1]] * 5), "NaN for all labels of a row"),
        (REGRESSION, torch.full((5, 3), torch.nan), "No row has a label"),
        (SINGLE, torch.ones(5, 3), "set the problem_type"),
    ],
)
def test_labels_of_another_problem_are_refused(problem: str, labels: Tensor, message: str) -> None:
    model, batch = tiny_classifier("bert", num_labels=3, problem_type=problem), batches_of(SEVERAL)[1]
    with pytest.raises(FedrotError, match=message):
        collect_losses(model, [{**batch, "labels": labels}])
