"""Task heads fitted to sums, against loops over rows and against what Bayes' rule says."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import scipy.stats
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedrot
from fedrot.errors import FedrotError, SymmetryError, UpdateError
from fedrot.head import (
    ClassSums,
    collect_classes,
    fit_head,
    fit_heads,
    head_of,
    largest_inputs,
    with_head,
)
from fedrot.precision import Float64
from fedrot.problems import PROBLEMS
from tests.families import config_of, inputs, model_of, state_of, symmetry_for
from tests.fedrot.collect.tiny import TINY
from tests.fedrot.oracles import Array, seeded
from tests.models import EVERYTHING, fresh_model, randomise
from tests.models import inputs as tokens

CLASSES = 3

#: The last linear layer of every family's classifiers of sequences, tokens and images.
LAST = {
    **dict.fromkeys(("bert", "albert", "deberta", "deberta-v2", "modernbert-biased"), "classifier"),
    **dict.fromkeys(("vit", "vit-plain", "clip-classifier"), "classifier"),
    **dict.fromkeys(("deberta-embedding", "gpt-neox-tokens", "falcon-rw"), "classifier"),
    **dict.fromkeys(("camembert", "mpnet"), "classifier.out_proj"),
    **dict.fromkeys(("t5-classifier", "bart-classifier"), "classification_head.out_proj"),
    **dict.fromkeys(("gpt2-classifier", "gptj-whole", "falcon-11b", "opt-projected"), "score"),
    **dict.fromkeys(("llama-biased", "qwen2", "phi3-partial"), "score"),
}
#: Those that label every token.
TOKENS = ("deberta-embedding", "gpt-neox-tokens", "falcon-rw")
#: Those that read the last token, at the layer that all tokens pass.
DECODERS = tuple(name for name, head in LAST.items() if head == "score")


# What the sums are


def sums_of(features: Array, labels: Array, classes: int = CLASSES) -> ClassSums:
    """Return the sums over rows, one row after the other."""
    counts, sums = np.zeros(classes), np.zeros((classes, features.shape[1]))
    gram = np.zeros((features.shape[1],) * 2)
    for row, label in zip(features, labels, strict=True):
        counts[label] += 1
        sums[label] += row
        gram += np.outer(row, row)
    return ClassSums(torch.from_numpy(counts), torch.from_numpy(sums), torch.from_numpy(gram))


def assert_close(found: ClassSums, expected: ClassSums, tolerance: float = 1e-10) -> None:
    assert torch.equal(found.counts, expected.counts)
    for name in ("sums", "gram"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours.dtype, ours.device.type) == (torch.float64, "cpu")
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max(), name


def batch_for(name: str, rows: int, seed: int = 0) -> dict[str, Tensor]:
    """Return inputs of a family's classifier with labels; those of padding are -100."""
    batch = inputs(name, rows)
    shape = batch["input_ids"].shape if name in TOKENS else (rows,)
    batch["labels"] = torch.randint(CLASSES, shape, generator=seeded(seed))
    if name in TOKENS:
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


def rows_of(model: Any, batches: list[dict[str, Tensor]], name: str) -> tuple[Array, Array]:
    """Return the inputs of the last layer, and the labels, row by row, from a hook of its own."""
    seen: list[Tensor] = []
    layer = model.get_submodule(LAST[name])
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    features, labels = [], []
    for batch in batches:
        seen.clear()
        with torch.no_grad():
            model.eval()(**{key: value for key, value in batch.items() if key != "labels"})
        for row, label in enumerate(batch["labels"]):
            if name in TOKENS:
                places = [place for place in range(len(label)) if label[place] >= 0]
                features += [seen[0][row, place] for place in places]
                labels += [int(label[place]) for place in places]
            elif label >= 0:
                # The texts are padded on the right.
                last = int(batch["attention_mask"][row].sum()) - 1 if name in DECODERS else ...
                features.append(seen[0][row][last])
                labels.append(int(label))
    handle.remove()
    return torch.stack(features).double().numpy(), np.array(labels)


@pytest.mark.parametrize("name", LAST)
def test_sums_of_every_family_are_those_of_a_loop_over_rows(name: str) -> None:
    model = model_of(name)
    batches = [batch_for(name, 4, seed=1), batch_for(name, 3, seed=2)]
    assert head_of(model.config, model.state_dict()) == LAST[name]
    found = collect_classes(model, batches, LAST[name])
    assert_close(found, sums_of(*rows_of(model, batches, name)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bert", "gpt2-classifier", "vit"])
def test_features_of_half_precision_are_summed_in_float64(name: str, dtype: torch.dtype) -> None:
    model = model_of(name).to(dtype)
    batch = batch_for(name, 5)
    batch = {key: v.to(dtype) if v.is_floating_point() else v for key, v in batch.items()}
    assert_close(
        collect_classes(model, [batch], LAST[name]), sums_of(*rows_of(model, [batch], name)), 1e-14
    )


@pytest.mark.parametrize("name", ["bert", "deberta-embedding"])
def test_rows_without_a_label_are_as_if_they_were_not_there(name: str) -> None:
    model, batch = model_of(name), batch_for(name, 4)
    part = {key: value.clone() for key, value in batch.items()}
    part["labels"][2:] = -1
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    found = collect_classes(model, [nothing, part, nothing], LAST[name])
    alone = collect_classes(model, [{key: v[:2] for key, v in batch.items()}], LAST[name])
    assert_close(found, alone)


def test_neither_order_nor_size_of_batches_matters() -> None:
    model, batch = model_of("gpt2-classifier"), batch_for("gpt2-classifier", 6)
    single = [{key: v[i : i + 1] for key, v in batch.items()} for i in (4, 1, 0, 5, 2, 3)]
    whole = collect_classes(model, [batch], "score")
    assert_close(collect_classes(model, single, "score"), whole)
    clients = [collect_classes(model, rows, "score") for rows in (single[:1], single[1:4], single[4:])]
    assert_close(sum(clients[1:], clients[0]), whole)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(2, 30), clients=st.integers(1, 5))
def test_sums_of_clients_are_the_sums_of_their_rows(seed: int, rows: int, clients: int) -> None:
    random = np.random.default_rng(seed)
    features, labels = random.normal(size=(rows, 4)) + 3, random.integers(CLASSES, size=rows)
    owner = random.integers(clients, size=rows)
    parts = [sums_of(features[owner == c], labels[owner == c]) for c in sorted(set(owner))]
    for order in (parts, parts[::-1]):
        assert_close(sum(order[1:], order[0]), sums_of(features, labels))


#: Families whose task heads read what has passed tanh, or a norm.
BOUNDED = ("bert", "albert", "camembert", "mpnet", "t5-classifier", "bart-classifier")
BOUNDED += ("vit", "vit-plain", "gpt2-classifier", "llama-biased", "qwen2", "phi3-partial")


@pytest.mark.parametrize("name", LAST)
def test_features_are_within_what_the_model_allows(name: str) -> None:
    """Also with weights that drive tanh to its ends; larger features are refused."""
    model = copy.deepcopy(model_of(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    largest = largest_inputs(model.config, model.state_dict(), LAST[name])
    assert (largest is not None) == (name in BOUNDED)
    if largest is not None:
        sums = collect_classes(model, [batch_for(name, 6)], LAST[name])
        sums.check_within(largest)
        for signs in ([1, 1], [1, -1]):
            features = 1.03 * np.outer(signs, largest.numpy())
            with pytest.raises(UpdateError, match="larger than the model's features can be"):
                sums_of(features, np.array([1, 1])).check_within(largest)


def test_priors_take_the_place_of_the_shares_of_classes() -> None:
    features, labels = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % CLASSES
    sums, priors = sums_of(features, labels), torch.tensor([10.0, 1.0, 5.0]).double()
    (weight, bias), (same, found) = fit_head(sums), fit_head(sums, priors=priors)
    assert torch.equal(weight, same)
    expected = bias + (priors / 16).log() + math.log(CLASSES)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_sums_of_other_layers_do_not_add_up() -> None:
    one = sums_of(np.eye(4), np.array([0, 1, 2, 0]))
    other = sums_of(np.eye(5), np.array([0, 1, 2, 0, 1]))
    with pytest.raises(UpdateError, match=r"\[3, 4\]\) and of .*\[3, 5\]"):
        one + other


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 8), clients=st.integers(1, 4))
def test_packed_sums_have_the_head_of_the_sums(seed: int, size: int, clients: int) -> None:
    """Also of features whose means are 100 times their deviations."""
    random = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(CLASSES), random.integers(CLASSES, size=60)])
    features = random.normal(size=(len(labels), size)) + random.normal(size=(CLASSES, size))[labels]
    features += random.choice([-100, 0, 100], size=size)
    owner = random.integers(clients, size=len(labels))
    exact = [sums_of(features[owner == c], labels[owner == c]) for c in sorted(set(owner))]
    sent = [ClassSums.unpacked(sums.packed(), (CLASSES, size)) for sums in exact]
    rows = torch.from_numpy(features)
    for shrinkage in (0.01, 0.5):
        (weight, bias), (ours, own) = (
            fit_head(sum(parts[1:], parts[0]), shrinkage) for parts in (exact, sent)
        )
        logits, found = rows @ weight.mT + bias, rows @ ours.mT + own
        assert (found - logits).abs().max() <= 1e-4 * logits.abs().max()


def test_packed_sums_are_small() -> None:
    random = np.random.default_rng(0)
    features, labels = random.normal(size=(40, 768)), np.arange(40) % 20
    assert len(safetensors.torch.save(sums_of(features, labels, 20).packed())) <= 1.3e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"gram": s.pop("scatter")}, "'gram': .* not .*'scatter'"),
        (lambda s: {"more": s["sums"]}, "'more': .* not"),
        (lambda s: {"sums": s["sums"].double()}, "'sums': .'torch.float64'.* not .*'torch.float32'"),
        (lambda s: {"sums": s["sums"][:2]}, r"'sums': .'torch.float32', \(2, 5\)"),
        (lambda s: {"scatter": s["scatter"][1:]}, r"\(14,\).* not .*\(15,\)"),
        (lambda s: {"scatter": s["scatter"].half()}, "'scatter': .'torch.float16'"),
        (lambda s: {"scatter": s["scatter"] * np.nan}, "hold NaN"),
        (lambda s: {"sums": _with(s["sums"], 0, np.inf)}, "hold NaN"),
        (lambda s: {"scatter": -s["scatter"]}, "have negative eigenvalues"),
        (lambda s: {"scatter": _with(s["scatter"], 1, 90)}, "have negative eigenvalues"),
        (lambda s: {"counts": -s["counts"]}, "counts .* are negative"),
        (lambda s: {"counts": 0 * s["counts"]}, "counts .* all 0"),
        (lambda s: {"counts": _with(s["counts"], 1, 0)}, "A class without rows has a sum"),
    ],
)
def test_packed_sums_that_no_rows_have_are_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    arrays = honest().packed()
    arrays |= change(arrays)
    with pytest.raises(UpdateError, match=message):
        ClassSums.unpacked(arrays, (CLASSES, 5))


# Sums that no rows have


def honest(seed: int = 0, rows: int = 40, size: int = 5) -> ClassSums:
    random = np.random.default_rng(seed)
    return sums_of(random.normal(size=(rows, size)) + 1, random.integers(CLASSES, size=rows))


def _with(value: Tensor, place: Any, entry: float) -> Tensor:
    changed = value.clone()
    changed[place] = entry
    return changed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"counts": s.counts.float()}, "'counts' are torch.float32"),
        (lambda s: {"counts": s.counts[:2]}, r"'counts' are torch.float64 of shape \[2\]"),
        (lambda s: {"sums": s.sums[0]}, "'counts' are torch.float64"),
        (lambda s: {"sums": s.sums.to_sparse()}, "'sums' is sparse"),
        (lambda s: {"gram": s.gram[:4]}, r"'gram' are torch.float64 of shape \[4, 5\]"),
        (lambda s: {"gram": s.gram.diagonal()}, r"'gram' are torch.float64 of shape \[5\]"),
        (lambda s: {"gram": s.gram.to("meta")}, "'gram' is on the device 'meta'"),
        (lambda s: {"counts": _with(s.counts, 0, np.nan)}, "'counts' hold NaN"),
        (lambda s: {"sums": _with(s.sums, (1, 2), np.inf)}, "'sums' hold NaN"),
        (lambda s: {"gram": _with(s.gram, (0, 0), -np.inf)}, "'gram' hold NaN"),
        (lambda s: {"counts": _with(s.counts, 0, -1)}, "counts .* are negative"),
        (lambda s: {"counts": 0 * s.counts, "sums": 0 * s.sums}, "counts .* all 0"),
        (lambda s: {"counts": _with(s.counts, 1, 0)}, "A class without rows has a sum"),
        (lambda s: {"gram": _with(s.gram, (0, 1), 90)}, "are not symmetric"),
        (lambda s: {"gram": -s.gram}, "have negative eigenvalues"),
        (lambda s: {"gram": _with(s.gram, (2, 2), 0)}, "have negative eigenvalues"),
        (lambda s: {"sums": 3 * s.sums}, "inside the classes have negative eigenvalues"),
        (lambda s: {"counts": s.counts / 9}, "inside the classes have negative eigenvalues"),
    ],
)
def test_sums_that_no_rows_have_are_refused(
    change: Callable[[ClassSums], dict[str, Any]], message: str
) -> None:
    sums = honest()
    with pytest.raises(UpdateError, match=message):
        replace(sums, **change(sums))


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 40),
    size=st.integers(1, 12),
    offset=st.sampled_from((0.0, 1.0, 100.0)),
    constant=st.booleans(),
)
def test_sums_of_rows_are_never_refused(
    seed: int, rows: int, size: int, offset: float, constant: bool
) -> None:
    random = np.random.default_rng(seed)
    features = offset + random.normal(size=(rows, size)) * 10.0 ** random.integers(-4, 3, size=size)
    features[:, 0] = 0.1 if constant else features[:, 0]
    sums = sums_of(features, random.integers(CLASSES, size=rows))
    assert ClassSums.unpacked(sums.packed(), (CLASSES, size)).rows == rows


def test_a_client_whose_features_are_not_finite_is_told() -> None:
    model, batch = model_of("vit"), batch_for("vit", 3)
    batch["pixel_values"][0, 0, 0, 0] = torch.inf
    with pytest.raises(UpdateError, match=r"hold NaN or Inf. Check the client's training"):
        collect_classes(model, [batch], "classifier")


# The head


def discriminant(features: Array, labels: Array, shrinkage: float) -> tuple[Array, Array]:
    """Return linear discriminants from rows, with deviations from means in place of differences."""
    size = features.shape[1]
    within, means, shares = np.zeros((size, size)), [], []
    for c in range(CLASSES):
        rows = [row for row, label in zip(features, labels, strict=True) if label == c]
        means.append(sum(rows) / len(rows))
        shares.append(len(rows) / len(features))
        for row in rows:
            within += np.outer(row - means[-1], row - means[-1]) / len(features)
    spread = sum(within[i, i] for i in range(size)) / size
    inverse = np.linalg.inv((1 - shrinkage) * within + shrinkage * spread * np.eye(size))
    weight = np.stack([inverse @ mean for mean in means])
    bias = [-(m @ inverse @ m) / 2 + np.log(p) for m, p in zip(means, shares, strict=True)]
    # What adds the same to every logit is left out: the discriminant at the mean of all rows.
    mean = features.mean(0)
    return weight - inverse @ mean, np.array(bias) + mean @ inverse @ mean / 2


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 8),
    rows=st.integers(12, 40),
    shrinkages=st.lists(st.sampled_from((0.0, 0.01, 0.1, 0.5, 1.0)), min_size=1),
)
def test_heads_are_discriminants_of_the_rows(
    seed: int, size: int, rows: int, shrinkages: list[float]
) -> None:
    random = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(CLASSES), random.integers(CLASSES, size=rows)])
    features = random.normal(size=(len(labels), size)) + 2 * random.normal(size=(CLASSES, size))[labels]
    weights, biases = fit_heads(sums_of(features, labels), shrinkages)
    assert (weights.dtype, biases.dtype) == (torch.float64, torch.float64)
    for shrinkage, weight, bias in zip(shrinkages, weights, biases, strict=True):
        expected = discriminant(features, labels, shrinkage)
        np.testing.assert_allclose(weight.numpy(), expected[0], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(bias.numpy(), expected[1], rtol=1e-6, atol=1e-7)


def gaussians(size: int = 4) -> tuple[Array, Array, Array]:
    """Return shares, means and the covariance of classes with normal features."""
    random = np.random.default_rng(3)
    root = random.normal(size=(size, size))
    return np.array([0.5, 0.3, 0.2]), random.normal(size=(CLASSES, size)), root @ root.T + np.eye(size)


def test_the_head_of_gaussian_classes_is_bayes_rule() -> None:
    shares, means, covariance = gaussians()
    second = covariance + sum(p * np.outer(m, m) for p, m in zip(shares, means, strict=True))
    given = (shares, shares[:, None] * means, second)
    counts, sums, gram = (1000.0 * torch.from_numpy(value) for value in given)
    weight, bias = fit_head(ClassSums(counts, sums, gram), shrinkage=0)
    points = np.random.default_rng(4).normal(size=(20, 4))
    density = [scipy.stats.multivariate_normal(m, covariance).pdf(points) for m in means]
    joint = shares[:, None] * np.stack(density)
    found = torch.softmax(torch.from_numpy(points) @ weight.mT + bias, 1)
    np.testing.assert_allclose(found.numpy().T, joint / joint.sum(0), rtol=1e-9)


def test_the_head_recovers_bayes_weights_from_samples() -> None:
    shares, means, covariance = gaussians()
    random = np.random.default_rng(5)
    labels = random.choice(CLASSES, size=40_000, p=shares)
    features = means[labels] + random.multivariate_normal(np.zeros(4), covariance, size=len(labels))
    weight, bias = fit_head(sums_of(features, labels), shrinkage=0)
    inverse = np.linalg.inv(covariance)
    offsets = np.log(shares) - np.array([m @ inverse @ m for m in means]) / 2
    # Only differences of logits matter.
    np.testing.assert_allclose((weight - weight[0]).numpy(), (means - means[0]) @ inverse, atol=0.03)
    np.testing.assert_allclose((bias - bias[0]).numpy(), offsets - offsets[0], atol=0.05)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shrinkage=st.sampled_from((0.01, 0.1, 1.0)))
def test_a_class_without_rows_is_never_the_most_likely(seed: int, shrinkage: float) -> None:
    random = np.random.default_rng(seed)
    labels = np.concatenate([[0, 2, 0, 2], random.choice([0, 2], size=20)])
    features = random.normal(size=(24, 5)) + 4 * random.normal(size=(CLASSES, 5))[labels]
    weight, bias = fit_head(sums_of(features, labels), shrinkage)
    assert bool(torch.isfinite(weight).all() & torch.isfinite(bias).all())
    logits = (10 * random.normal(size=(200, 5))) @ weight.numpy().T + bias.numpy()
    assert (logits[:, 1] <= logits[:, [0, 2]].max(1) - np.log(2 * 24) + 1e-6).all()
    assert not bool(weight[1].any())
    # The classes with rows have the head that they would have alone.
    alone = fit_head(sums_of(features, labels // 2, classes=2), shrinkage)
    torch.testing.assert_close(weight[[0, 2]], alone[0])
    torch.testing.assert_close(bias[[0, 2]], alone[1])


@pytest.mark.parametrize("shrinkage", [0.05, 0.5])
def test_weights_hold_the_bias_times_the_regression_of_1_on_the_features(shrinkage: float) -> None:
    random = np.random.default_rng(6)
    labels = random.integers(CLASSES, size=60)
    features = random.normal(size=(60, 4)) + random.normal(size=(CLASSES, 4))[labels] + 2
    sums = sums_of(features, labels)
    weight, bias = fit_head(sums, shrinkage)
    unbiased, nothing = fit_head(sums, shrinkage, bias=False)
    assert torch.equal(nothing, torch.zeros(CLASSES, dtype=torch.float64))
    mean = features.mean(0)
    apart = (features - mean) / np.sqrt(60)
    ridge = np.sqrt(shrinkage * (apart**2).sum() / 4) * np.eye(4)
    rows = np.concatenate([np.sqrt(1 - shrinkage) * apart, ridge, mean[None]])
    direction = np.linalg.lstsq(rows, np.array([0.0] * 64 + [1.0]))[0]
    np.testing.assert_allclose(
        unbiased.numpy(), weight.numpy() + np.outer(bias.numpy(), direction), rtol=1e-9
    )


def test_without_a_bias_logits_are_those_with_one_where_a_feature_is_constant() -> None:
    random = np.random.default_rng(7)
    labels = random.integers(CLASSES, size=80)
    features = random.normal(size=(80, 4)) + 2 * random.normal(size=(CLASSES, 4))[labels]
    features[:, 3] = 5
    sums = sums_of(features, labels)
    weight, bias = fit_head(sums, 1e-6)
    unbiased, _ = fit_head(sums, 1e-6, bias=False)
    rows = torch.from_numpy(features)
    difference = (rows @ unbiased.mT - rows @ weight.mT - bias).abs().max()
    assert difference < 1e-4 < 1e-1 < bias.abs().max()


@pytest.mark.parametrize("shrinkage", [-0.1, 1.1, float("nan")])
def test_a_shrinkage_outside_of_0_and_1_is_refused(shrinkage: float) -> None:
    with pytest.raises(FedrotError, match=r"shrinkage is .*; it must be from 0 to 1"):
        fit_head(honest(), shrinkage)
    with pytest.raises(FedrotError, match="no shrinkage"):
        fit_heads(honest(), [])


def test_sums_that_determine_no_head_are_refused() -> None:
    with pytest.raises(UpdateError, match="rows of at least two classes"):
        fit_head(sums_of(np.eye(4), np.array([1, 1, 1, 1])))
    with pytest.raises(UpdateError, match="do not vary inside the classes"):
        fit_head(sums_of(np.eye(3)[[0, 1, 0, 1]] + 0.1, np.array([0, 1, 0, 1])))
    few = honest(rows=4, size=9)
    with pytest.raises(UpdateError, match="singular: raise the shrinkage"):
        fit_head(few, shrinkage=0)
    assert bool(torch.isfinite(fit_head(few)[0]).all())


# The head in a model


@pytest.mark.parametrize("name", ["bert", "camembert", "vit", "deberta", "t5-classifier"])
def test_a_model_with_the_head_has_its_logits(name: str) -> None:
    model, batch = model_of(name), batch_for(name, 30)
    weight, bias = fit_head(collect_classes(model, [batch], LAST[name]))
    features, _ = rows_of(model, [batch], name)
    before = model.state_dict()
    after = with_head(before, LAST[name], weight, bias)
    changed = {key for key in before if after[key] is not before[key]}
    assert changed == {f"{LAST[name]}.weight", f"{LAST[name]}.bias"}
    model.load_state_dict(after)
    with torch.no_grad():
        logits = model(**{key: v for key, v in batch.items() if key != "labels"}).logits
    expected = features @ weight.numpy().T + bias.numpy()
    np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["bert", "gpt2-classifier", "llama-biased", "vit"])
def test_a_moved_model_has_the_moved_head(name: str) -> None:
    """Orders, signs and rotations of the hidden units that the head reads act on its weights."""
    state, symmetry = state_of(name), symmetry_for(name)
    if name in ("gpt2-classifier", "vit"):  # their residual stream is rotated
        state, symmetry = fedrot.canonical(state, symmetry), symmetry.rotated
    biased = f"{LAST[name]}.bias" in state
    batch = batch_for(name, 40)

    def fitted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        with Float64():
            sums = collect_classes(model_of(name, tensors), [batch], LAST[name])
        return with_head(tensors, LAST[name], *fit_head(sums, bias=biased))

    def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return fedrot.random_equivalent(tensors, symmetry, 3, parts(symmetry))

    key = f"{LAST[name]}.weight"
    expected, found = moved(fitted(state))[key], fitted(moved(state))[key]
    assert (expected - fitted(state)[key]).abs().max() > 0.1 * expected.abs().max()
    assert (found - expected).abs().max() <= 1e-7 * expected.abs().max()


def parts(symmetry: fedrot.Symmetry) -> tuple[str, ...]:
    """Return all parts that the model has."""
    return tuple(part for part in EVERYTHING if any(group.part == part for group in symmetry.groups))


def test_a_head_is_written_in_the_models_dtype_and_refused_where_it_does_not_fit() -> None:
    state = {"score.weight": torch.zeros(3, 5, dtype=torch.float16), "other": torch.zeros(2)}
    weight, bias = torch.ones(3, 5).double(), torch.zeros(3).double()
    after = with_head(state, "score", weight, bias)
    assert after["score.weight"].dtype == torch.float16
    assert torch.equal(after["score.weight"], torch.ones(3, 5).half())
    assert after["other"] is state["other"]
    assert not bool(state["score.weight"].any())
    with pytest.raises(FedrotError, match=r"'score' has no bias: fit it with .*bias=False"):
        with_head(state, "score", weight, bias + 1)
    with pytest.raises(FedrotError, match=r"'classifier.weight' is missing"):
        with_head(state, "classifier", weight, bias)
    with pytest.raises(FedrotError, match=r"has shape \[3, 5\], but the task head has \[3, 4\]"):
        with_head(state, "score", weight[:, :4], bias)
    with pytest.raises(FedrotError, match=r"is torch.float16, which cannot hold"):
        with_head(state, "score", 1e5 * weight, bias)


# The layer's name


def test_wrapped_names_and_plain_settings_have_a_head() -> None:
    settings = {"model_type": "bert", "id2label": {"0": "a", "1": "b", "2": "c"}}
    assert head_of(settings, {"module.classifier.weight": (3, 8)}) == "module.classifier"
    # Files of transformers do not list the labels of two classes.
    assert head_of({"model_type": "bert"}, {"classifier.weight": (2, 8)}) == "classifier"
    assert (
        head_of({"num_labels": 4}, {"score.weight": (4, 8), "pre_classifier.weight": (4, 8)}) == "score"
    )


@pytest.mark.parametrize("name", ["roberta", "gpt2", "llama", "bart", "t5-encoder", "mistral", "deit"])
def test_a_model_without_one_head_of_classes_is_told(name: str) -> None:
    with pytest.raises(
        FedrotError, match=r"classes needs one of the names .* the model has none. Use a model"
    ):
        head_of(config_of(name), state_of(name))


def test_heads_of_every_problem_are_found() -> None:
    tensors = {"classifier.weight": (3, 8)}
    for problem in PROBLEMS:
        assert head_of({"problem_type": problem, "num_labels": 3}, tensors) == "classifier"
    one = {"classifier.weight": (1, 8)}
    assert head_of({"num_labels": 1}, one) == "classifier"
    with pytest.raises(FedrotError, match="The task head of 1 classes"):
        head_of({"num_labels": 1, "problem_type": "single_label_classification"}, one)
    with pytest.raises(FedrotError, match="problem_type 'ranking' is unknown; use one of single"):
        head_of({"problem_type": "ranking"}, tensors)
    with pytest.raises(FedrotError, match=r"more than one: classifier, score"):
        head_of({"num_labels": 3}, {**tensors, "score.weight": (3, 8)})
    with pytest.raises(SymmetryError, match="The config is a str"):
        head_of("bert", tensors)


@pytest.mark.parametrize(
    ("name", "head", "message"),
    [
        ("camembert", "classifier.dense", "are not the model's logits"),
        ("bert", "bert.encoder.layer.1.output.dense", "are not the model's logits"),
        ("deit", "cls_classifier", "are not the model's logits"),
        ("bert", "bert.embeddings.word_embeddings", "has no linear layer"),
        ("bert", "score", "has no linear layer 'score'"),
    ],
)
def test_another_layer_than_the_last_is_refused(name: str, head: str, message: str) -> None:
    with pytest.raises(FedrotError, match=message):
        collect_classes(model_of(name), [batch_for(name, 4)], head)


class _Odd(nn.Module):
    """Does with its task head what a test says."""

    def __init__(self, logits: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.score, self.logits = nn.Linear(4, CLASSES), logits

    def forward(self, x: Tensor) -> Any:
        found = self.logits(self.score, x)
        return transformers.modeling_outputs.SequenceClassifierOutput(logits=found)


@pytest.mark.parametrize(
    ("logits", "rows"),
    [
        (lambda score, x: torch.cat([score(half) for half in x.chunk(2)]), 6),
        (lambda score, x: (score(x), score(2 * x))[1], 6),
        (lambda score, x: 2 * score(x), 6),
        (lambda score, x: score(x).softmax(1), 6),
        (lambda score, x: score(x).flip(1) + torch.arange(CLASSES), 6),
        # Places above 256 are rounded: two rows have one place, or the only row has another's.
        (lambda score, x: score(x).bfloat16().float(), 299),
        (lambda score, x: score(x.expand(300, 4))[257:258].bfloat16(), 1),
    ],
)
def test_logits_that_are_not_the_outputs_of_the_head_are_refused(logits: Any, rows: int) -> None:
    batch = {"x": torch.randn(rows, 4), "labels": torch.arange(rows) % CLASSES}
    with pytest.raises(FedrotError, match="are not the model's logits"):
        collect_classes(_Odd(logits), [batch], "score")


def test_another_layer_of_a_model_in_half_precision_is_refused() -> None:
    model, batch = model_of("camembert").bfloat16(), batch_for("camembert", 4)
    with pytest.raises(FedrotError, match="are not the model's logits"):
        collect_classes(model, [batch], "classifier.dense")


# Labels


def _labels(batch: dict[str, Tensor], labels: Any) -> list[dict[str, Tensor]]:
    return [{**batch, "labels": torch.as_tensor(labels)}]


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (lambda b: [], "No row has a label"),
        (lambda b: _labels(b, [-100, -100]), "No row has a label"),
        (lambda b: [{k: v for k, v in b.items() if k != "labels"}], "A batch has no 'labels'"),
        (lambda b: _labels(b, [0, 3]), "A label is 3, but the model has 3 classes"),
        (lambda b: _labels(b, [0.0, 1.0]), r"labels are torch.float32 \[2\]"),
        (lambda b: _labels(b, [[0.0, 1.0, 1.0]] * 2), r"labels are torch.float32 \[2, 3\]"),
        (lambda b: _labels(b, [0, 1, 2]), r"labels are torch.int64 \[3\], the logits \[2, 3\]"),
    ],
)
def test_labels_that_are_no_classes_are_refused(batches: Any, message: str) -> None:
    model = fresh_model("bert-classifier")
    with pytest.raises(FedrotError, match=message):
        collect_classes(model, batches(tokens()), "classifier")


def test_a_language_model_has_no_classes() -> None:
    batch = {**inputs("gpt2"), "labels": inputs("gpt2")["input_ids"]}
    with pytest.raises(FedrotError, match="GPT2LMHeadModel predicts the next token"):
        collect_classes(model_of("gpt2"), [batch], "lm_head")


# The model afterwards


def _traces(model: nn.Module) -> list[Any]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return [hooks, [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails: bool) -> None:
    settings: dict[str, Any] = {**TINY, "num_labels": CLASSES, "hidden_dropout_prob": 0.5}
    model = randomise(transformers.BertForSequenceClassification(transformers.BertConfig(**settings)))
    model.train()
    model.bert.encoder.eval()
    batch = {**tokens(), "labels": torch.tensor([2, 0])}
    model(**batch).loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    before, random = _traces(model), torch.get_rng_state()
    with pytest.raises(FedrotError) if fails else nullcontext():
        second = {**batch, "labels": torch.tensor([0, 7])} if fails else batch
        one = collect_classes(model, [batch, second], "classifier")
        two = collect_classes(model, [batch, second], "classifier")
        assert torch.equal(one.gram, two.gram)  # no dropout
    assert _traces(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert all(torch.equal(t, tensors[name]) for name, t in model.state_dict().items())
    # Its own logits come back: the layer's output was replaced while the sums were collected.
    assert bool(model(**batch).logits.requires_grad)
