"""Task heads of several labels a row and of regressions, against fits to the rows themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedrot.errors import FedrotError, UpdateError
from fedrot.head import ClassSums, collect_classes, fit_head, fit_heads, head_of, with_head
from fedrot.problems import PROBLEMS, REGRESSION, SEVERAL, SINGLE, problem_of
from fedrot.temperature import ONE, TEMPERATURES, best_temperature, collect_losses, compare_losses
from tests.fedrot.collect.tiny import TINY
from tests.fedrot.oracles import Array, seeded
from tests.fedrot.test_temperature import heads_of
from tests.models import VOCABULARY, randomise

OUTPUTS = 3


def sums_of(features: Array, labels: Array, problem: str) -> ClassSums:
    """Return the sums over rows, one row after the other."""
    one_class = problem == SINGLE
    factors = [np.eye(OUTPUTS)[int(y[0])] if one_class else np.array([1.0, *y]) for y in labels]
    rows = list(zip(factors, features, strict=True))
    terms = (sum(factors), sum(np.outer(y, h) for y, h in rows), sum(np.outer(h, h) for h in features))
    counts, sums, gram = (torch.from_numpy(np.asarray(term)) for term in terms)
    return ClassSums(counts, sums, gram, problem)


def drawn(problem: str, seed: int, rows: int = 40, size: int = 5) -> tuple[Array, Array]:
    """Return features and labels that depend on them."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, size)) @ random.normal(size=(size, size)) + random.normal(
        size=size
    )
    values = features @ random.normal(size=(size, OUTPUTS)) + random.normal(size=(rows, OUTPUTS))
    if problem == SINGLE:
        labels = values.argmax(1)[:, None].astype(float)
        labels[:OUTPUTS, 0] = range(OUTPUTS)
        return features, labels
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
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 6),
    shrinkages=st.lists(st.sampled_from((0.0, 0.01, 0.3, 1.0)), min_size=1, max_size=3),
)
def test_every_label_has_a_discriminant_of_two_classes(
    seed: int, size: int, shrinkages: list[float]
) -> None:
    features, labels = drawn(SEVERAL, seed, size=size)
    for shrinkage, weight, bias in zip(
        shrinkages, *fit_heads(sums_of(features, labels, SEVERAL), shrinkages), strict=True
    ):
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
    priors = torch.tensor([100.0, 20, 30, 100]).double()
    same, moved = fit_head(sums, priors=priors)
    odds = np.log(30 / 70) - np.log(labels[:, 1].sum() / (40 - labels[:, 1].sum()))
    np.testing.assert_allclose((moved - bias)[1].numpy(), odds)
    np.testing.assert_allclose(moved[0].numpy(), np.log(20.5 / 80.5))
    assert torch.equal(same, weight)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 6),
    shrinkage=st.sampled_from((0.0, 0.01, 0.3, 1.0)),
)
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
@given(
    seed=st.integers(0, 2**32 - 1),
    problem=st.sampled_from((*PROBLEMS,)),
    shrinkage=st.sampled_from((0.01, 0.3)),
    biased=st.booleans(),
)
def test_rotated_features_have_the_same_logits(
    seed: int, problem: str, shrinkage: float, biased: bool
) -> None:
    features, labels = drawn(problem, seed)
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(5, 5)))[0]
    logits = []
    for own in (features, features @ rotation):
        weight, bias = fit_head(sums_of(own, labels, problem), shrinkage, biased)
        logits.append(own @ weight.numpy().T + bias.numpy())
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_without_a_bias_logits_are_those_with_one_where_a_feature_is_constant(problem: str) -> None:
    features, labels = drawn(problem, 3)
    features[:, 4] = 5
    sums = sums_of(features, labels, problem)
    (weight, bias), (unbiased, nothing) = (fit_head(sums, 1e-7, biased) for biased in (True, False))
    expected = features @ weight.numpy().T + bias.numpy()
    np.testing.assert_allclose(features @ unbiased.numpy().T, expected, atol=1e-3)
    assert not bool(nothing.any())
    assert bias.abs().max() > 0.1


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    problem=st.sampled_from((SEVERAL, REGRESSION)),
    rows=st.integers(1, 40),
    clients=st.integers(1, 4),
    offset=st.sampled_from((0.0, 100.0)),
    constant=st.booleans(),
)
def test_packed_sums_of_clients_have_the_head_of_all_rows(
    seed: int, problem: str, rows: int, clients: int, offset: float, constant: bool
) -> None:
    """Also if the means of features and labels are large; sums of rows are never refused."""
    features, labels = drawn(problem, seed, rows)
    features += offset
    features[:, 0] = 0.1 if constant else features[:, 0]
    labels += offset if problem == REGRESSION else 0
    owner = np.random.default_rng(seed).integers(clients, size=rows)
    parts = [sums_of(features[owner == c], labels[owner == c], problem) for c in sorted(set(owner))]
    sent = [ClassSums.unpacked(part.packed(), (OUTPUTS, 5), problem) for part in parts]
    total = sum(sent[1:], sent[0])
    assert total.rows == rows
    if rows < 20:
        return
    (weight, bias), (ours, own) = (fit_head(s, 0.1) for s in (sums_of(features, labels, problem), total))
    logits, found = (features @ w.numpy().T + b.numpy() for w, b in ((weight, bias), (ours, own)))
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
        (REGRESSION, lambda s: {"sums": s.sums * torch.nan}, "'sums' hold NaN"),
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


def model_of(kind: str, problem: str | None, outputs: int = OUTPUTS) -> Any:
    """Return a float64 classifier with dropout, in training mode."""
    config: dict[str, Any] = {"num_labels": outputs, "problem_type": problem}
    if kind == "bert":
        config |= {**TINY, "hidden_dropout_prob": 0.5}
        model: Any = transformers.BertForSequenceClassification(transformers.BertConfig(**config))
    else:
        config |= {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 2, "pad_token_id": 0}
        model = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**config))
    return randomise(model).double().train()


def batches_of(problem: str, outputs: int = OUTPUTS, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return two batches, of which two rows have no labels."""
    found = []
    for rows in (20, 5):
        ids = torch.randint(1, VOCABULARY, (rows, 6), generator=seeded(seed + rows))
        labels = torch.randn(rows, outputs, generator=seeded(seed + rows), dtype=torch.float64)
        labels = (labels > 0).float() if problem == SEVERAL else labels
        labels[2] = torch.nan
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model.eval()(**{key: value for key, value in batch.items() if key != "labels"}).logits


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
@pytest.mark.parametrize(("problem", "outputs"), [(SEVERAL, 3), (REGRESSION, 3), (None, 1)])
def test_a_fitted_head_has_the_logits_of_a_fit_to_the_rows(
    kind: str, problem: str | None, outputs: int
) -> None:
    model = model_of(kind, problem, outputs)
    name = problem_of(model.config)
    batches, head = batches_of(name, outputs), head_of(model.config, model.state_dict())
    seen: list[Tensor] = []
    layer = model.get_submodule(head)
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    logits = [logits_of(model, batch) for batch in batches]
    handle.remove()
    model.train()
    found = collect_classes(model, batches, head)
    assert model.training
    rows = [rows.reshape(len(rows), -1, rows.shape[-1])[:, -1] for rows in seen]
    features, labels = torch.cat(rows), torch.cat([batch["labels"] for batch in batches]).double()
    kept = ~labels.isnan().any(1)
    factors = torch.cat([torch.ones(int(kept.sum()), 1), labels[kept]], 1).double()
    torch.testing.assert_close(found.counts, factors.sum(0))
    torch.testing.assert_close(found.sums, factors.mT @ features[kept])
    torch.testing.assert_close(found.gram, features[kept].mT @ features[kept])
    weight, bias = fit_head(found, 0.1, bias=kind == "bert")
    model.load_state_dict(with_head(model.state_dict(), head, weight, bias))
    after = torch.cat([logits_of(model, batch) for batch in batches])
    torch.testing.assert_close(after, features @ weight.mT + bias)
    # The head explains more than no head: the loss on these rows is smaller than before.
    assert collect_losses(model, batches).losses[0, ONE] < loss(
        torch.cat(logits)[kept], labels[kept], name
    )


def loss(logits: Tensor, labels: Tensor, problem: str, temperature: float = 1.0) -> float:
    """Return the summed loss, from its definition."""
    if problem == REGRESSION:
        return float(((logits - labels) ** 2).sum())
    probability = 1 / (1 + (-logits / temperature).exp())
    return float(-(labels * probability.log() + (1 - labels) * (1 - probability).log()).sum())


@pytest.mark.parametrize("problem", [SEVERAL, REGRESSION])
def test_losses_are_those_of_a_loop_over_rows(problem: str) -> None:
    model, batches = model_of("bert", problem), batches_of(problem)
    found = collect_losses(model, batches)
    logits = torch.cat([logits_of(model, batch) for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches]).double()
    logits, labels = logits[~labels.isnan().any(1)], labels[~labels.isnan().any(1)]
    for temperature, value in zip(TEMPERATURES, found.losses[0].tolist(), strict=True):
        assert value == pytest.approx(loss(logits, labels, problem, temperature))
    right = int(((logits > 0) == (labels > 0)).all(1).sum()) if problem == SEVERAL else 0
    assert found.counts.tolist() == [23, right]
    assert problem == SEVERAL or best_temperature(found) == 1
    head, heads = heads_of(model, [1, 2], [-1, 0])
    both = compare_losses([model], batches, head, [heads])
    torch.testing.assert_close(both.losses[:1], found.losses)
    torch.testing.assert_close(both.squares[:1], found.squares)
    squares = [
        (loss(one, y, problem) - loss(2 * one, y, problem)) ** 2
        for one, y in zip(logits, labels, strict=True)
    ]
    assert float(both.squares[1, ONE]) == pytest.approx(sum(squares))


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
    model, batch = model_of("bert", problem), batches_of(SEVERAL)[1]
    with pytest.raises(FedrotError, match=message):
        collect_losses(model, [{**batch, "labels": labels}])
