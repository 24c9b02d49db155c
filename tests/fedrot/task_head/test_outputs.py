"""Task heads of one class, several labels and regressions, against fits to the rows
themselves.
"""

import copy
import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from fedrot.errors import FedrotError, UpdateError
from fedrot.task_head.fit import fitted_task_head, fitted_task_heads, with_task_head
from fedrot.task_head.losses import (
    ONE,
    TEMPERATURES,
    TaskHeads,
    best_temperature,
    collect_losses,
    compare_losses,
)
from fedrot.task_head.names import task_head_of
from fedrot.task_head.outputs import (
    OUTPUT_KINDS,
    REGRESSION,
    SEVERAL,
    SINGLE,
    problem_type_of,
)
from fedrot.task_head.sums import ClassSums, collect_classes
from tests.fedrot.collect.tiny import batch_of, tiny_classifier
from tests.fedrot.oracles import seeded
from tests.fedrot.task_head.classifiers import CLASSES, sums_of, unlabelled
from tests.models import randomise

SEEDS = st.integers(0, 2**32 - 1)
ANY = st.sampled_from((*OUTPUT_KINDS,))


def drawn(problem, seed=0, rows=40, size=5):
    """Return features and labels that depend on them."""
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, size)) @ random.normal(size=(size, size)) + 1
    values = features @ random.normal(size=(size, CLASSES)) + random.normal(
        size=(rows, CLASSES)
    )
    if problem == SINGLE:
        return features, np.concatenate([np.arange(CLASSES), values.argmax(1)])[:rows]
    return features, (values > values.mean(0)).astype(
        float
    ) if problem == SEVERAL else values + 7


def diagonal(features, within):
    """Return the variances of features inside the classes, with their floor."""
    floor = np.maximum(features.var(0) / len(features), 1e-10 * (features**2).mean(0))
    found = np.maximum(np.diag(within), floor)
    return np.where(found > 0, found, 1)


def scatter(features, labels):
    """Return the covariance inside the classes, from deviations of their means."""
    means = np.stack([features[labels == label].mean(0) for label in labels])
    return (features - means).T @ (features - means) / len(features)


def discriminant(
    features,
    labels,
    shrinkage,
    priors=None,
    target=None,
):
    """Return linear discriminants from rows, with deviations from means in place of
    differences; the covariance is shrunk to a diagonal, by default its own.
    """
    mean = features.mean(0)
    means = [features[labels == c].mean(0) for c in range(labels.max() + 1)]
    within = scatter(features, labels)
    target = diagonal(features, within) if target is None else target
    # Columns have one unit, so that the solution is exact for small ones, too.
    unit = np.sqrt(target)
    shrunk = (1 - shrinkage) * within / np.outer(unit, unit)
    shrunk += shrinkage * np.eye(len(mean))
    weight = np.stack(
        [np.linalg.solve(shrunk, (m - mean) / unit) / unit for m in means]
    )
    # What adds the same to every logit is left out: the discriminant at the mean of all
    # rows.
    shares = np.bincount(labels) if priors is None else priors
    biases = [
        np.log(p / sum(shares)) - w @ (m + mean) / 2
        for w, m, p in zip(weight, means, shares, strict=True)
    ]
    return weight, np.array(biases)


def of_two_classes(features, labels, shrinkage, priors=None):
    """Return the log odds of the discriminants between rows with and without each
    label; covariances are shrunk to the variances of all rows, times the mean share
    that lies inside the classes.
    """
    every = diagonal(features, np.diag(features.var(0)))
    fits = []
    for place, has in enumerate(labels.T.astype(int)):
        inside = (np.diag(scatter(features, has)) / every).mean()
        odds = None
        if priors is not None:
            odds = np.array([priors[0] - priors[place + 1], priors[place + 1]])
        target = every * max(inside, 1e-3)
        fits.append(discriminant(features, has, shrinkage, odds, target))
    return np.stack([w[1] - w[0] for w, _ in fits]), np.array(
        [b[1] - b[0] for _, b in fits]
    )


def ridge(features, labels, shrinkage, priors=None):
    """Return ridge regressions, as least squares with rows more; the mean residual is
    0.
    """
    unit = np.sqrt(diagonal(features, np.diag(features.var(0))))
    apart = (features - features.mean(0)) / unit
    root = np.sqrt((1 - shrinkage) / len(features))
    more = np.sqrt(shrinkage) * np.eye(features.shape[1])
    values = np.concatenate(
        [root * (labels - labels.mean(0)), np.zeros((len(more), CLASSES))]
    )
    weight = np.linalg.lstsq(np.concatenate([root * apart, more]), values)[0].T / unit
    return weight, (labels - features @ weight.T).mean(0)


def regression_of_one(features, labels, shrinkage):
    """Return the ridge regression of 1 on the features, as least squares with rows
    more; variances are shrunk to those inside the classes, times the mean ratio.
    """
    mean = features.mean(0)
    classes = labels if labels.ndim == 1 else np.zeros(len(labels))
    within = scatter(features, classes)
    unit = np.sqrt(diagonal(features, within))
    ratio = 1 + ((features.var(0) - np.diag(within)) / unit**2).mean()
    more = np.sqrt(shrinkage * ratio) * np.eye(len(mean))
    apart = np.sqrt((1 - shrinkage) / len(features)) * (features - mean) / unit
    rows = np.concatenate([apart, more, (mean / unit)[None]])
    return np.linalg.lstsq(rows, np.eye(len(rows))[-1])[0] / unit


ORACLES = {SINGLE: discriminant, SEVERAL: of_two_classes, REGRESSION: ridge}


@settings(max_examples=60, deadline=None)
@given(
    seed=SEEDS,
    problem=ANY,
    size=st.integers(1, 8),
    rows=st.integers(25, 45),
    shrinkages=st.lists(
        st.sampled_from((0.0, 0.01, 0.1, 0.5, 1.0)), min_size=1, max_size=3
    ),
)
def test_heads_are_those_of_the_rows(seed, problem, size, rows, shrinkages):
    features, labels = drawn(problem, seed, rows, size)
    weights, biases = fitted_task_heads(sums_of(features, labels, problem), shrinkages)
    assert (weights.dtype, biases.dtype) == (torch.float64, torch.float64)
    for shrinkage, weight, bias in zip(shrinkages, weights, biases, strict=True):
        expected = ORACLES[problem](features, labels, shrinkage)
        np.testing.assert_allclose(weight.numpy(), expected[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(bias.numpy(), expected[1], rtol=1e-6, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(SEEDS, ANY, st.integers(1, 40), st.sampled_from((0.0, 100.0)))
def test_packed_sums_of_clients_have_the_head_of_all_rows(seed, problem, rows, offset):
    """Also if means are 100 times the deviations, and if units differ in size; no sums
    are refused.
    """
    (features, labels), clients = drawn(problem, seed, rows), 1 + seed % 4
    features = (features + offset) * 10.0 ** np.random.default_rng(seed).integers(
        -4, 3, size=5
    )
    features[:, 0] = 0.1 if seed % 3 else features[:, 0]
    labels = labels + offset if problem == REGRESSION else labels
    owner = np.random.default_rng(seed).integers(clients, size=rows)
    parts = [
        sums_of(features[owner == c], labels[owner == c], problem)
        for c in sorted(set(owner))
    ]
    sent = [ClassSums.unpacked(part.packed(), (CLASSES, 5), problem) for part in parts]
    total = sum(sent[1:], sent[0])
    assert total.rows == rows
    if rows < 20:
        return
    fits = [
        fitted_task_head(sums, 0.1)
        for sums in (sums_of(features, labels, problem), total)
    ]
    logits, found = (
        features @ weight.numpy().T + bias.numpy() for weight, bias in fits
    )
    assert np.abs(found - logits).max() <= 1e-4 * np.abs(logits - logits.mean(0)).max()


def test_packed_sums_are_small():
    features = np.random.default_rng(0).normal(size=(40, 768))
    sums = sums_of(features, np.arange(40) % 20, outputs=20)
    assert len(safetensors.torch.save(sums.packed())) <= 1.3e6


# Classes and labels of which nothing is known


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, shrinkage=st.sampled_from((0.01, 0.1, 1.0)))
def test_a_class_without_rows_is_never_the_most_likely(seed, shrinkage):
    random = np.random.default_rng(seed)
    labels = np.concatenate([[0, 2, 0, 2], random.choice([0, 2], size=20)])
    features = (
        random.normal(size=(24, 5)) + 4 * random.normal(size=(CLASSES, 5))[labels]
    )
    sums = sums_of(features, labels)
    assert sums.absent.tolist() == [False, True, False]
    weight, bias = fitted_task_head(sums, shrinkage)
    assert bool(torch.isfinite(weight).all() & torch.isfinite(bias).all())
    logits = (10 * random.normal(size=(200, 5))) @ weight.numpy().T + bias.numpy()
    assert (logits[:, 1] <= logits[:, [0, 2]].max(1) - np.log(2 * 24) + 1e-6).all()
    assert not bool(weight[1].any())
    # The classes with rows have the head that they would have alone.
    alone = fitted_task_head(sums_of(features, labels // 2, outputs=2), shrinkage)
    assert_close(weight[[0, 2]], alone[0])
    assert_close(bias[[0, 2]], alone[1])


def test_a_label_of_no_row_or_of_every_row_has_log_odds_alone():
    features, labels = drawn(SEVERAL)
    labels[:, 0], labels[:, 2] = 0, 1
    sums = sums_of(features, labels, SEVERAL)
    assert sums.absent.tolist() == [True, False, True]
    assert not sums_of(*drawn(REGRESSION), REGRESSION).absent.any()
    weight, bias = fitted_task_head(sums)
    assert weight.any(1).tolist() == [False, True, False]
    np.testing.assert_allclose(
        bias[[0, 2]].numpy(), [np.log(0.5 / 40.5), np.log(40.5 / 0.5)]
    )
    same, moved = fitted_task_head(
        sums, priors=torch.tensor([100.0, 20, 30, 100]).double()
    )
    odds = np.log(30 / 70) - np.log(labels[:, 1].sum() / (40 - labels[:, 1].sum()))
    np.testing.assert_allclose((moved - bias)[1].numpy(), odds)
    np.testing.assert_allclose(moved[0].numpy(), np.log(20.5 / 80.5))
    assert torch.equal(same, weight)


# Easy problems, and other units


def points(features, labels, columns):
    """Return features that are equal inside the classes, in some columns."""
    equal = features.copy()
    means = np.stack([features[labels == label].mean(0) for label in labels])
    equal[:, columns] = means[:, columns]
    return equal


def more(features, column):
    return np.insert(features, 1, column, axis=1)


NOISE = np.random.default_rng(9).normal(size=40)

#: What a server receives in place of features, and how near its logits have to be.
UNITS = {
    "all": (lambda f: f * 10.0 ** np.arange(-6, 9, 3), 1e-7),
    "times 1,000": (lambda f: f * [1e3, 1, 1, 1, 1], 1e-7),
    "times 1e-3": (lambda f: f * [1e-3, 1, 1, 1, 1], 1e-7),
    "one constant": (lambda f: more(f, 0.1), 1e-5),
    "one always 0": (lambda f: more(f, 0.0), 1e-7),
    "one rounded": (lambda f: more(f, 0.1 + 1e-9 * NOISE), 1e-4),
}


@pytest.mark.parametrize("problem", OUTPUT_KINDS)
@pytest.mark.parametrize("name", UNITS)
def test_units_of_features_and_constant_features_change_no_logit(name, problem):
    """With and without a bias, with and without priors."""
    features, labels = drawn(problem, 3)
    change, tolerance = UNITS[name]
    changed = change(features)
    sums = sums_of(changed, labels, problem)
    counts = np.array([90.0, 20.0, 30.0, 40.0][problem == SINGLE :])
    for bias, priors in itertools.product((True, False), (None, counts)):
        weight, offset = ORACLES[problem](features, labels, 0.1, priors)
        if not bias:
            offset = np.outer(changed @ regression_of_one(changed, labels, 0.1), offset)
        expected = features @ weight.T + offset
        given = None if priors is None else torch.from_numpy(priors)
        found = fitted_task_head(sums, 0.1, bias, given)
        logits = changed @ found[0].numpy().T + found[1].numpy()
        np.testing.assert_allclose(logits, expected, atol=tolerance, rtol=tolerance)


#: Rows, features and classes of easy problems: all rows of a class are equal, in all
#: columns or in some; or there are fewer rows than features.
EASY = {
    "points": lambda f, c: points(f, c, slice(None)),
    "points in a plane": lambda f, c: points(f, c, slice(2)),
    "few rows": lambda f, c: f,
}


@pytest.mark.parametrize("name", EASY)
@pytest.mark.parametrize("problem", OUTPUT_KINDS)
def test_easy_problems_have_the_head_of_their_rows(name, problem):
    rows, size = (8, 12) if name == "few rows" else (40, 5)
    features, labels = drawn(problem, 4, rows, size)
    classes = labels if problem == SINGLE else (labels[:, 0] > labels[:, 0].mean())
    features = EASY[name](features, classes.astype(int))
    sums = sums_of(features, labels, problem)
    sent = ClassSums.unpacked(sums.packed(), (CLASSES, size), problem)
    expected = ORACLES[problem](features, labels, 0.1)
    logits = features @ expected[0].T + expected[1]
    for received, tolerance in ((sums, 1e-6), (sent, 5e-3)):
        weight, bias = (value.numpy() for value in fitted_task_head(received, 0.1))
        found = features @ weight.T + bias
        assert np.abs(found - logits).max() <= tolerance * np.abs(logits).max()
    if problem == SINGLE and name != "few rows":
        assert (found.argmax(1) == labels).all()


@pytest.mark.parametrize(
    ("factor", "offset"), [(1e6, 0), (1e-6, 0), (1, 1e6), (1e6, 1e9), (1e-6, -0.1)]
)
def test_numbers_may_have_any_unit(factor, offset):
    """Also if clients send float32, and their means are far from 0."""
    features, labels = drawn(REGRESSION)
    weight, bias = ridge(features, labels, 0.1)
    values = factor * labels + offset
    parts = [sums_of(features[c::2], values[c::2], REGRESSION) for c in range(2)]
    sent = [
        ClassSums.unpacked(part.packed(), (CLASSES, 5), REGRESSION) for part in parts
    ]
    sums = sent[0] + sent[1]
    found = fitted_task_head(sums, 0.1)
    np.testing.assert_allclose(found[0] / factor, weight, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose((found[1] - offset) / factor, bias, rtol=1e-4, atol=1e-4)
    units = OUTPUT_KINDS[REGRESSION].units(sums.counts)
    np.testing.assert_allclose(units / factor, labels.std(0), rtol=1e-3)
    # Numbers that are all 0, or all 2, have a unit, too.
    units = OUTPUT_KINDS[REGRESSION].units(torch.tensor([4.0, 0, 8, 0, 16]).double())
    assert units.tolist() == pytest.approx([1, 2e-6])


# What is refused


def _with(value, place, entry):
    changed = value.clone()
    changed[place] = entry
    return changed


#: Sums that no rows have: a change of good ones, and a word of the error.
BAD = [
    (SINGLE, "counts", lambda v: v.float(), "'counts' are torch.float32"),
    (SINGLE, "counts", lambda v: v[:2], r"'counts' .*\[2\]"),
    (SINGLE, "sums", lambda v: v.to_sparse(), "'sums' is sparse"),
    (SINGLE, "gram", lambda v: v[:4], r"'gram' .*\[4, 5\]"),
    (SINGLE, "gram", lambda v: v.to("meta"), "'gram' is on the device 'meta'"),
    (SINGLE, "counts", lambda v: _with(v, 0, np.nan), "'counts' hold NaN"),
    (SINGLE, "gram", lambda v: _with(v, (0, 0), -np.inf), "'gram' hold NaN"),
    (SINGLE, "counts", lambda v: _with(v, 0, -1), "counts .* are negative"),
    (SINGLE, "counts", lambda v: 0 * v, "counts .* all 0"),
    (SINGLE, "counts", lambda v: _with(v, 1, 0), "without rows"),
    (SINGLE, "gram", lambda v: _with(v, (0, 1), 90), "symmetric"),
    (SINGLE, "gram", lambda v: _with(v, (2, 2), 0), "negative eigenvalues"),
    (SINGLE, "sums", lambda v: 3 * v, "inside the classes"),
    (SINGLE, "counts", lambda v: v / 9, "inside the classes"),
    (SEVERAL, "counts", lambda v: -v, "not positive"),
    (REGRESSION, "counts", lambda v: 0 * v, "not positive"),
    (SEVERAL, "counts", lambda v: _with(v, 1, -v[1]), "contradict"),
    (SEVERAL, "counts", lambda v: _with(v, 2, 9 * v[2]), "contradict"),
    (SEVERAL, "counts", lambda v: _with(v, 1, 0), "contradict"),
    (SEVERAL, "sums", lambda v: _with(v, 3, 4 * v[3]), "contradict"),
    (REGRESSION, "gram", lambda v: v / 9, "negative eigenvalues"),
]
BAD_PACKED = [
    ("gram", lambda v: v, "'gram': .* not .*'scatter'"),
    ("sums", lambda v: v.double(), "'sums': .*float64'.* not .*float32'"),
    ("scatter", lambda v: v * np.nan, "hold NaN"),
    ("scatter", lambda v: _with(v, 1, 90), "negative eigenvalues"),
    ("counts", lambda v: 0 * v, "counts .* all 0"),
]


@pytest.mark.parametrize(("problem", "name", "change", "message"), BAD)
def test_sums_that_no_rows_have_are_refused(problem, name, change, message):
    sums = sums_of(*drawn(problem), problem)
    with pytest.raises(UpdateError, match=message):
        replace(sums, **{name: change(getattr(sums, name))})


@pytest.mark.parametrize(("name", "change", "message"), BAD_PACKED)
def test_packed_sums_that_no_rows_have_are_refused(name, change, message):
    arrays = sums_of(*drawn(SINGLE)).packed()
    arrays[name] = change(arrays.get(name, arrays["scatter"]))
    with pytest.raises(UpdateError, match=message):
        ClassSums.unpacked(arrays, (CLASSES, 5))


def _of(labels, rows=4, size=4):
    return sums_of(np.eye(max(rows, size))[:rows, :size], np.array(labels))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _of([0, 1, 2, 0]) + _of([0, 1, 2, 0], size=5),
            r"\[3, 4\]\) and of .*\[3, 5\]",
        ),
        (
            lambda: (
                sums_of(*drawn(SEVERAL), SEVERAL)
                + sums_of(*drawn(REGRESSION), REGRESSION)
            ),
            "multi_label_classification.* and of .*regression",
        ),
        (lambda: fitted_task_head(_of([1, 1, 1, 1])), "two classes"),
        (
            lambda: fitted_task_head(sums_of(np.ones((4, 3)), np.arange(4) % 2)),
            "not vary",
        ),
        (
            lambda: fitted_task_head(sums_of(*drawn(SINGLE, rows=4, size=9)), 0),
            "singular",
        ),
        *(
            (
                lambda value=value: fitted_task_head(_of([0, 1, 0, 1]), value),
                "shrinkage is .* from 0 to 1",
            )
            for value in (-0.1, 1.1, float("nan"))
        ),
        (lambda: fitted_task_heads(_of([0, 1, 0, 1]), []), "no shrinkage"),
    ],
)
def test_sums_that_determine_no_head_are_refused(call, message):
    with pytest.raises(FedrotError, match=message):
        call()


# Models of several labels and of regressions


def batches_of(problem, outputs=CLASSES):
    """Return two batches, in each of which one row has no labels."""
    found = [batch_of(rows, rows) for rows in (20, 5)]
    for rows, batch in zip((20, 5), found, strict=True):
        values = torch.randn(rows, outputs, generator=seeded(rows))
        batch["labels"] = (values > 0).float() if problem == SEVERAL else values
        batch["labels"][2] = torch.nan
    return found


def logits_of(model, batches):
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        return torch.cat([model(**unlabelled(batch)).logits for batch in batches])


#: The loss of every output, from its definition.
LOSSES = {
    REGRESSION: lambda logits, labels: (logits - labels) ** 2,
    SEVERAL: lambda logits, labels: (1 + (-logits).exp()).log() + (1 - labels) * logits,
}


@pytest.mark.parametrize(
    ("kind", "problem", "outputs"),
    [
        ("bert", SEVERAL, 3),
        ("gpt2", SEVERAL, 3),
        ("bert", REGRESSION, 3),
        ("gpt2", None, 1),
    ],
)
def test_a_model_has_the_head_and_losses_of_its_rows(kind, problem, outputs):
    model = tiny_classifier(kind, num_labels=outputs, problem_type=problem)
    model = randomise(model).double().train()
    name = problem_type_of(model.config)
    several = name == SEVERAL
    batches = batches_of(name, outputs)
    state = model.state_dict()
    head = task_head_of(model.config, state)
    bare = copy.deepcopy(model)
    setattr(bare, head, nn.Identity())
    labels = torch.cat([batch["labels"] for batch in batches]).double()
    kept = ~labels.isnan().any(1)
    labels = labels[kept]
    features = logits_of(bare, batches)[kept]
    found = collect_classes(model, batches, head)
    expected = sums_of(features.numpy(), labels.numpy(), name)
    for field in ("counts", "sums", "gram"):
        assert_close(getattr(found, field), getattr(expected, field))
    before = collect_losses(model, batches).losses
    weight, bias = fitted_task_head(found, 0.1, bias=kind == "bert")
    model.load_state_dict(with_task_head(state, head, weight, bias))
    after = collect_losses(model, batches)
    logits = features @ weight.mT + bias
    assert_close(logits_of(model, batches)[kept], logits)
    for temperature, value in zip(TEMPERATURES, after.losses[0].tolist(), strict=True):
        cooled = logits / temperature if several else logits
        assert value == pytest.approx(float(LOSSES[name](cooled, labels).sum()))
    assert after.losses[0, ONE] < before[0, ONE]
    right = ((logits > 0) == (labels > 0)).all(1).sum() * several
    assert after.counts.tolist() == [23, right]
    assert several or best_temperature(after) == 1
    partners = torch.tensor([-1, 0])
    heads = TaskHeads(weight.expand(2, -1, -1), bias.expand(2, -1), partners)
    both = compare_losses([model], batches, head, [heads])
    assert_close(both.losses, after.losses.expand(2, -1))
    assert_close(both.squares, torch.cat([after.squares, 0 * after.squares]))
    if several:
        return
    # Numbers in another unit have the same losses in this unit.
    units = torch.tensor([1e9])
    for batch in batches:
        batch["labels"] = 1e9 * batch["labels"]
    heads = TaskHeads(1e9 * heads.weight, 1e9 * heads.bias, partners, units)
    scaled = compare_losses([model], batches, head, [heads])
    assert_close(scaled.losses, both.losses, rtol=1e-5, atol=1e-5)
    assert collect_losses(model, batches).losses[0, ONE] > 1e18


@pytest.mark.parametrize(
    ("problem", "labels", "message"),
    [
        (SEVERAL, [[1, 1, 1]] * 5, r"int64 \[5, 3\]"),
        (SEVERAL, [1.0] * 5, r"float32 \[5\], the logits \[5, 3\]"),
        (SEVERAL, [[0.5] * 3] * 5, "each 0 or 1"),
        (REGRESSION, [[torch.inf] * 3] * 5, "each finite"),
        (REGRESSION, [[1, torch.nan, 1]] * 5, "NaN for all labels of a row"),
        (REGRESSION, [[torch.nan] * 3] * 5, "No row"),
        (SINGLE, [[1.0] * 3] * 5, "set the problem_type"),
        (SINGLE, [-100] * 5, "No row"),
        (SINGLE, None, "no 'labels'"),
        (SINGLE, [0, 0, 0, 0, 3], "label is 3, but the model has 3 classes"),
        (SINGLE, [0.0] * 5, r"float32 \[5\]"),
        (SINGLE, [0] * 4, r"int64 \[4\], the logits \[5, 3\]"),
    ],
)
def test_labels_of_another_problem_are_refused(problem, labels, message):
    model = tiny_classifier("bert", num_labels=3, problem_type=problem)
    batch = batch_of(5, 5)
    if labels is not None:
        batch["labels"] = torch.tensor(labels)
    for collect in (collect_losses, partial(collect_classes, task_head="classifier")):
        with pytest.raises(FedrotError, match=message):
            collect(model, [batch])
