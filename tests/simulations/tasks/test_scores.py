"""Scores of predictions against scikit-learn, SciPy and torch; entities against spans
found by hand.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk
from torch.nn import functional

from fedrot.simulations.data.labels import METRICS_OF_KIND
from fedrot.simulations.tasks.scores import entity_scores, evaluate_predictions
from fedrot.task_head.losses import TEMPERATURES

OF_CLASSES = ("accuracy", "macro_f1", "micro_f1")
seeds = st.integers(0, 2**31)


def drawn(kind, seed, rows, classes):
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(rows, classes)) * 10 ** rng.uniform(-2, 2)
    labels = {
        "single": rng.integers(0, classes, rows),
        "multi": (rng.random((rows, classes)) < 0.4).astype(np.float32),
        "regression": rng.normal(size=rows).astype(np.float32),
    }
    return (outputs[:, :1] if kind == "regression" else outputs), labels[kind]


@settings(max_examples=80, deadline=None)
@given(
    seed=seeds,
    rows=st.integers(1, 30),
    classes=st.integers(2, 5),
    kind=st.sampled_from(("single", "multi")),
)
def test_classes(seed, rows, classes, kind):
    logits, labels = drawn(kind, seed, rows, classes)
    more = ("ece", "calibrated_loss") if kind == "single" else ()
    found = evaluate_predictions(kind, (*OF_CLASSES, *more), logits, labels)
    ours = torch.from_numpy(logits)
    truth = torch.from_numpy(labels)
    predicted = logits.argmax(1) if more else (logits > 0).astype(int)
    for name in ("macro", "micro"):
        expected = sk.f1_score(labels, predicted, average=name, zero_division=0)
        assert found[f"{name}_f1"] == pytest.approx(expected)
    if more:
        assert found["accuracy"] == pytest.approx((predicted == labels).mean())
        assert found["loss"] == pytest.approx(
            float(functional.cross_entropy(ours, truth))
        )
        best = min(
            float(functional.cross_entropy(ours / t, truth)) for t in TEMPERATURES
        )
        assert found["calibrated_loss"] == pytest.approx(best)
        sure = ours.softmax(1).max(1).values.numpy()
        bins = np.minimum((sure * 15).astype(int), 14)
        gaps = [((predicted == labels) - sure)[bins == own].sum() for own in range(15)]
        assert found["ece"] == pytest.approx(np.abs(gaps).sum() / rows, abs=1e-6)
    else:
        assert found["accuracy"] == pytest.approx((predicted == labels).all(1).mean())
        # torch rounds to the labels' float32 otherwise
        loss = functional.binary_cross_entropy_with_logits(ours, truth.double())
        assert found["loss"] == pytest.approx(float(loss))


@settings(max_examples=40, deadline=None)
@given(seed=seeds, rows=st.integers(3, 30), flat=st.booleans())
def test_scores_of_rows(seed, rows, flat):
    outputs, labels = drawn("regression", seed, rows, 1)
    given_ = outputs[:, 0] if flat else outputs
    found = evaluate_predictions("regression", ("pearson", "spearman"), given_, labels)
    assert found["pearson"] == pytest.approx(
        stats.pearsonr(outputs[:, 0], labels).statistic
    )
    assert found["spearman"] == pytest.approx(
        stats.spearmanr(outputs[:, 0], labels).statistic
    )
    assert found["loss"] == pytest.approx(((outputs[:, 0] - labels) ** 2).mean())


@pytest.mark.parametrize("outputs", [np.ones((4, 1)), np.array([[1.0], [2], [3], [4]])])
def test_a_correlation_with_a_constant_is_zero(outputs):
    labels = np.array([1.0, 2, 3, 5]) if np.ptp(outputs) == 0 else np.ones(4)
    found = evaluate_predictions("regression", ("pearson", "spearman"), outputs, labels)
    assert (found["pearson"], found["spearman"]) == (0, 0)


@pytest.mark.parametrize("kind", METRICS_OF_KIND)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_outputs_that_are_not_finite_have_no_scores(kind, value):
    outputs, labels = drawn(kind, 0, 6, 3)
    outputs[2, 0] = value
    found = evaluate_predictions(kind, METRICS_OF_KIND[kind], outputs, labels)
    assert tuple(found) == (*METRICS_OF_KIND[kind], "loss")
    assert all(map(math.isnan, found.values()))


TAGS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def spans(tags):
    """Return the entities of a row: type, first and last word."""
    found = set()
    start = 0
    for place, (tag, after) in enumerate(zip(tags, [*tags[1:], "O"], strict=False)):
        before = tags[place - 1] if place else "O"
        if tag != "O" and (tag[0] == "B" or before[1:] != tag[1:]):
            start = place
        if tag != "O" and (after == "O" or after[0] == "B" or after[1:] != tag[1:]):
            found.add((tag[2:], start, place))
    return found


rows_of_tags = st.lists(
    st.lists(st.tuples(*[st.integers(0, 4)] * 2), max_size=8), min_size=1, max_size=5
)


@settings(max_examples=150, deadline=None)
@given(rows=rows_of_tags)
def test_entities_are_right_as_a_whole(rows):
    truth, guesses = (
        [np.array([pair[i] for pair in row], int) for row in rows] for i in (0, 1)
    )
    real, found = (
        {
            (n, *span)
            for n, row in enumerate(side)
            for span in spans([TAGS[t] for t in row])
        }
        for side in (truth, guesses)
    )
    hits = len(real & found)
    precision = hits / max(len(found), 1)
    recall = hits / max(len(real), 1)
    f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
    scores = entity_scores(truth, guesses, TAGS)
    assert tuple(scores) == ("f1", "precision", "recall")
    assert scores == pytest.approx({"f1": f1, "precision": precision, "recall": recall})
